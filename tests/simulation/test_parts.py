"""The simulator's parts: time, memory, stores, and the executor's allowed nondeterminism."""

from array import array
from collections.abc import Mapping
from itertools import pairwise, takewhile
from typing import NamedTuple

from lockstep.coordinator.ballot import (
    Answered,
    Capped,
    Expired,
    Landed,
    Progress,
    Quiesced,
    QuiesceExpired,
    TransferEnded,
)
from lockstep.ranks.protocol.orders import (
    KV_POOL,
    Cancel,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    Fetch,
    Fork,
    LookUp,
    Need,
    ObjectTransfer,
)
from lockstep.simulation.rank.conditions import Conditions
from lockstep.simulation.rank.epoch import make_executor
from lockstep.simulation.rank.executor import SimulatedExecutor
from lockstep.simulation.rank.memory import SimulatedStore, Slots, SymbolicMemory
from lockstep.simulation.world.clock import RankClock, VirtualClock
from lockstep.simulation.world.contents import EMPTY, GARBAGE, SHARDS, TORN
from lockstep.simulation.world.faults import FaultSource, Mishap, Mishaps
from lockstep.simulation.world.prompts import Prompts
from lockstep.simulation.world.world import draw_world

KEYS = (b"a", b"b", b"c")
WINDOW_POOL, STATE_POOL = "window", "state"


class Rank:
    """A single executor with three objects in its store and empty memory."""

    def __init__(self, rates: Mapping[Mishap, float] | None = None, seed: int = 1) -> None:
        self.clock = VirtualClock()
        self.findings: list[str] = []
        self.memory = SymbolicMemory(
            {KV_POOL: (4, 4), WINDOW_POOL: (4, 4), STATE_POOL: (3, 3)}, self.findings.append
        )
        self.device = self.memory.device[KV_POOL]
        self.host = self.memory.host[KV_POOL]
        self.store = SimulatedStore({})
        for content, key in enumerate(KEYS, start=1):
            self.store.write(KV_POOL, key, content)
        world = draw_world(seed, ranks=1, steps=100, faults="calm", depth=0)
        plan = Mishaps(
            rates=rates or {},
            paces=(1.0,),
            skews_ms=(0,),
            tiny_pools=False,
            tiny_bounds=False,
            group_faults={},
        )
        self.faults = FaultSource(plan, world.stream("faults"))
        conditions = Conditions(
            0,
            clock=self.clock,
            faults=self.faults,
            random=world.stream("executor"),
            find=self.findings.append,
        )
        self.executor: SimulatedExecutor = make_executor(conditions, self.memory, self.store)

    def after(self, duration_ms: int) -> list[Progress]:
        self.clock.advance(duration_ms * 1000)
        return self.executor.progress()


def fetch(*pages: int, timeout_s: float = 1.0) -> Fetch:
    return Fetch(1, (ObjectTransfer(KV_POOL, KEYS[: len(pages)], pages),), timeout_s)


def test_events_of_one_instant_happen_in_the_order_in_which_they_were_planned() -> None:
    clock, seen = VirtualClock(), list[str]()
    clock.after(20, lambda: seen.append("late"))
    clock.after(10, lambda: seen.append("first"))
    clock.after(10, lambda: seen.append("second"))

    clock.advance(10)
    assert seen == ["first", "second"]
    assert clock.now_us == 10

    clock.advance_to_next(1_000)
    assert seen == ["first", "second", "late"]
    assert clock.now_us == 20


def test_the_clock_of_a_rank_leaps_and_stands_still_and_never_goes_back() -> None:
    clock = VirtualClock()
    rank_clock = RankClock(clock, ahead_ms=5)
    clock.advance(10_000)
    seen = [rank_clock.now_ms()]

    rank_clock.leap(100)
    seen.append(rank_clock.now_ms())
    rank_clock.stand_still(20)
    seen.append(rank_clock.now_ms())
    for duration_us in (19_000, 1_000, 3_000):
        clock.advance(duration_us)
        seen.append(rank_clock.now_ms())

    assert seen == [15, 115, 115, 115, 115, 118]


def test_a_clock_that_stands_still_twice_at_a_time_loses_both() -> None:
    clock = VirtualClock()
    rank_clock = RankClock(clock, ahead_ms=0)

    rank_clock.stand_still(20)
    rank_clock.stand_still(10)
    clock.advance(35_000)

    assert rank_clock.now_ms() == 5


def test_many_may_read_a_slot_and_a_writer_must_be_alone() -> None:
    findings: list[str] = []
    slots = Slots("host", 2, findings.append)
    slots.claim_to_read(0, 1)
    slots.claim_to_read(0, 2)
    assert not findings

    slots.claim_to_write(0, 3)
    assert findings[0] == "rank 0: operation 3 writes host kv page 0 while others still read it"

    slots.claim_to_write(1, 4)
    slots.claim_to_read(1, 5)
    other = "operation 4 still writes"
    assert findings[1] == f"rank 0: operation 5 reads host kv page 1 while {other} it"

    slots.claim_to_write(7, 6)
    wrong = "names host kv page 7, which has 2 pages"
    assert findings[2] == f"rank 0: operation 6 {wrong}"


def test_a_model_that_computes_over_a_transfer_or_over_another_page_is_found() -> None:
    findings: list[str] = []
    slots = Slots("device", 2, findings.append)
    slots.compute(0, EMPTY, 5, "r")
    slots.compute(0, 5, 6, "r")
    assert not findings

    slots.compute(0, 5, 7, "r")
    slots.claim_to_read(1, 9)
    slots.compute(1, EMPTY, 8, "r")
    held = "holds content 6 of rank 0 instead of content 5 of rank 0"
    assert findings[0] == f"rank 0: device kv page 0 of request r {held}"
    touched = "a transfer touches device kv page 1, although request r computes into it"
    assert findings[1] == f"rank 0: {touched}"


def test_a_key_means_one_prefix_on_every_rank_and_the_first_writer_wins() -> None:
    meanings: dict[tuple[str, bytes], int] = {}
    one, other = SimulatedStore(meanings), SimulatedStore(meanings, rank=1)
    seven, eight = 7 + SHARDS, 8 + SHARDS
    assert one.write(KV_POOL, b"k", 7) is None
    assert other.write(KV_POOL, b"k", seven) is None
    stores, under = "rank 1: a persist stores", "under the key of content 7 of rank 1"
    assert other.write(KV_POOL, b"k", eight) == f"{stores} content 8 of rank 1 {under}"
    assert other.write(KV_POOL, b"k", 7) == f"{stores} content 7 of rank 0 {under}"
    assert other.write(KV_POOL, b"l", GARBAGE) == f"{stores} garbage under a page key"
    assert other.read(KV_POOL, b"k") == seven
    assert one.has(KV_POOL, b"k")
    assert not one.has(KV_POOL, b"l")
    assert one.lose(5)
    assert len(one) == 0


def test_a_fetch_tears_its_pages_and_then_fills_them() -> None:
    rank = Rank()
    rank.executor.carry_out([fetch(2, 0, 1)])
    assert TORN in rank.host.content
    assert rank.host.claims() == [0, 1, 2]

    progress = rank.after(500)

    assert progress[-1] == Landed(1, 3)
    assert rank.host.content == [2, 3, 1, EMPTY]
    assert rank.host.claims() == []
    assert not rank.findings


def test_a_page_that_cannot_land_caps_the_fetch_before_it() -> None:
    rank = Rank()
    rank.store.remove(KV_POOL, b"b")
    rank.executor.carry_out([fetch(0, 1, 2)])

    progress = rank.after(500)

    assert Capped(1, 1) in progress
    assert max(each.pages for each in progress if isinstance(each, Landed)) == 1
    assert rank.host.content[1] == GARBAGE


def test_the_pages_of_all_pools_are_one_sequence() -> None:
    rank = Rank()
    rank.store.write(WINDOW_POOL, b"c", 13)
    rank.store.write(STATE_POOL, b"c", 23)
    rank.executor.carry_out([fetch_of_three_pools()])

    progress = rank.after(500)

    assert progress[-1] == Landed(1, 5)
    assert rank.host.content[:3] == [1, 2, 3]
    assert rank.memory.host[WINDOW_POOL].content[3] == 13
    assert rank.memory.host[STATE_POOL].content[0] == 23
    assert not rank.findings


def fetch_of_three_pools() -> Fetch:
    transfers = (
        ObjectTransfer(KV_POOL, KEYS, (0, 1, 2)),
        ObjectTransfer(WINDOW_POOL, KEYS[2:], (3,)),
        ObjectTransfer(STATE_POOL, KEYS[2:], (0,)),
    )
    return Fetch(1, transfers, 1.0)


def test_an_order_that_names_a_pool_that_is_not_there_is_found() -> None:
    rank = Rank()
    rank.executor.carry_out([Fetch(1, (ObjectTransfer("index", KEYS, (0, 1, 2)),), 1.0)])
    assert rank.findings[0] == "rank 0: an order names the pool 'index', which is unknown"


def test_a_fork_copies_at_once_and_every_later_order_sees_it() -> None:
    rank = Rank()
    states = rank.memory.device[STATE_POOL]
    states.content[0] = 7

    rank.executor.carry_out(
        [Fork(STATE_POOL, 0, 2), CopyToHost(1, (CopyTransfer(STATE_POOL, (2,), (1,)),), 1.0)]
    )

    assert states.content == [7, EMPTY, 7]
    assert rank.after(100) == [TransferEnded(1, ok=True)]
    assert rank.memory.host[STATE_POOL].content[1] == 7
    assert not rank.findings


def test_a_fork_of_nothing_or_into_a_slot_that_a_copy_reads_is_found() -> None:
    rank = Rank()
    rank.memory.device[STATE_POOL].content[1] = 7
    rank.executor.carry_out([Fork(STATE_POOL, 0, 2)])
    assert rank.findings[0] == "rank 0: a fork copies device state page 0, which holds nothing"

    rank.executor.carry_out(
        [CopyToHost(1, (CopyTransfer(STATE_POOL, (1,), (1,)),), 1.0), Fork(STATE_POOL, 2, 1)]
    )
    touched = "a transfer touches device state page 1"
    assert rank.findings[-1] == f"rank 0: {touched}, although a state is copied into it"


class Hung(NamedTuple):
    """Result of cancelling a read that hangs."""

    claims: list[int]
    restless: set[int]
    ends: bool
    """Whether the cancelled read completed eventually."""
    content: int
    """Content of the host page (a number) at the end, after any late write."""
    late_writes: int


def hung_read(seed: int) -> Hung | None:
    """Cancel a hanging read; return its effects, or None if it ended before the quiesce deadline."""
    rank = Rank({Mishap.HUNG_READ: 1.0}, seed)
    rank.executor.carry_out([fetch(0, timeout_s=0.1)])
    rank.clock.advance(200_000)
    rank.executor.carry_out([Cancel(1, 0.05)])
    progress = rank.after(100)
    if Quiesced(1) in progress:
        return None
    assert QuiesceExpired(1) in progress
    claims, restless = list(rank.host.claims()), set(rank.executor.restless())
    ends = Quiesced(1) in rank.after(2_000)
    late_writes = rank.faults.counts[Mishap.LATE_WRITE]
    return Hung(claims, restless, ends, rank.host.content[0], late_writes)


def test_a_hung_read_outlives_its_deadline_and_writes_late_or_never() -> None:
    hung = [each for each in map(hung_read, range(40)) if each is not None]

    assert {(*each.claims, *each.restless) for each in hung} == {(0, 1)}
    assert {(each.ends, each.content) for each in hung} == {(True, 1), (False, TORN)}
    assert any(each.late_writes for each in hung)


def test_a_cancelled_fetch_is_quiet_only_after_its_last_touch() -> None:
    rank = Rank()
    rank.executor.carry_out([fetch(0, 1, 2), Cancel(1, 1.0)])
    assert rank.executor.progress() == []
    assert rank.host.claims()

    assert rank.after(500)[-1] == Quiesced(1)
    assert rank.host.claims() == []


def test_copies_carry_what_the_source_holds_at_their_end() -> None:
    rank = Rank()
    rank.device.content[3] = 9
    rank.executor.carry_out([CopyToHost(1, (CopyTransfer(KV_POOL, (3,), (2,)),), 1.0)])
    assert rank.after(100) == [TransferEnded(1, ok=True)]
    rank.executor.carry_out([CopyToDevice(2, (CopyTransfer(KV_POOL, (2,), (0,)),), 1.0)])
    assert rank.after(100) == [TransferEnded(2, ok=True)]
    assert rank.device.content[0] == 9
    assert not rank.findings


def test_a_copy_of_a_page_that_holds_nothing_is_found() -> None:
    rank = Rank()
    rank.executor.carry_out([CopyToDevice(2, (CopyTransfer(KV_POOL, (2,), (0,)),), 1.0)])
    rank.after(100)
    assert rank.findings[0] == "rank 0: operation 2 copies host kv page 2, which holds nothing"


def test_a_copy_that_hangs_ends_badly_and_falls_quiet_late() -> None:
    rank = Rank({Mishap.HUNG_COPY: 1.0})
    rank.device.content[3] = 9
    rank.executor.carry_out([CopyToHost(1, (CopyTransfer(KV_POOL, (3,), (2,)),), 0.05)])
    assert TransferEnded(1, ok=False) in rank.after(60)
    rank.executor.carry_out([Cancel(1, 0.01)])
    assert QuiesceExpired(1) in rank.after(15)


def test_a_lookup_is_a_hint_that_may_be_wrong_in_both_directions_or_never_come() -> None:
    look_up = LookUp(1, 0, (Need(KV_POOL, 0, (*KEYS, b"x")),), 1.0)

    def answer(rates: Mapping[Mishap, float]) -> list[Progress]:
        rank = Rank(rates)
        rank.executor.carry_out([look_up])
        return rank.after(1_100)

    assert answer({}) == [Answered(1, 3)]
    assert answer({Mishap.LOOKUP_TOO_MANY: 1.0}) == [Answered(1, 4)]
    too_few = answer({Mishap.LOOKUP_TOO_FEW: 1.0})[0]
    assert isinstance(too_few, Answered)
    assert too_few.pages < 3
    assert answer({Mishap.LOOKUP_SILENT: 1.0}) == [Expired(1)]


def test_a_lookup_may_be_wrong_about_any_key_so_that_ranks_differ_within_their_sets() -> None:
    def answer(seed: int) -> tuple[int, ...]:
        rank = Rank({Mishap.LOOKUP_TOO_MANY: 0.5, Mishap.LOOKUP_TOO_FEW: 0.5}, seed)
        rank.store.write(STATE_POOL, b"a", 21)
        rank.store.write(STATE_POOL, b"c", 23)
        rank.executor.carry_out([look_up_states()])
        (answered,) = rank.after(1_100)
        assert isinstance(answered, Answered)
        return answered.beyond

    answers = {answer(seed) for seed in range(60)}
    assert {(), (1,), (3,), (1, 3), (1, 2, 3)} <= answers


def look_up_states() -> LookUp:
    return LookUp(1, 0, (Need(KV_POOL, 0, KEYS), Need(STATE_POOL, 0, KEYS, span=1)), 1.0)


def test_a_key_that_is_not_to_be_asked_for_is_not_there_whatever_a_lookup_gets_wrong() -> None:
    rank = Rank({Mishap.LOOKUP_TOO_MANY: 1.0})
    need = Need(STATE_POOL, 0, (b"", b"b", b""), span=1)
    rank.executor.carry_out([LookUp(1, 0, (Need(KV_POOL, 0, KEYS), need), 1.0)])
    assert rank.after(500) == [Answered(1, 0, (2,))]


def test_a_repeated_report_comes_again_and_a_late_one_later() -> None:
    repeated = Rank({Mishap.REPEATED_REPORT: 1.0})
    repeated.executor.carry_out([LookUp(1, 0, (Need(KV_POOL, 0, KEYS),), 1.0)])
    assert repeated.after(500) == [Answered(1, 3), Answered(1, 3)]

    late = Rank({Mishap.LATE_REPORT: 1.0})
    late.executor.carry_out([LookUp(1, 0, (Need(KV_POOL, 0, KEYS),), 1.0)])
    assert late.after(500) == [Answered(1, 3)]


def test_a_closed_executor_touches_nothing_any_more() -> None:
    rank = Rank()
    rank.executor.carry_out([fetch(0)])
    rank.executor.close()
    assert rank.after(1_000) == []
    assert rank.host.content[0] == TORN


def test_prompts_of_a_hybrid_model_part_at_the_ends_of_pages_and_within_them() -> None:
    world = draw_world(0, ranks=1, steps=100, profile="hybrid-all", depth=0)
    prompts = Prompts(world)
    drawn = sorted({prompts.draw()[1] for _ in range(60)})

    partings = [common_tokens(*pair) % world.page_tokens for pair in pairwise(drawn)]

    assert 5 < partings.count(0) < len(partings) - 5


def common_tokens(one: bytes, other: bytes) -> int:
    pairs = zip(array("i", one), array("i", other), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
