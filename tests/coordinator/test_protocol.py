"""Rules P1, P3 to P5 and P8 of `coordinator/round.py`, checked on every rank."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from lockstep.coordinator.ballot import Answered, Ballot
from lockstep.coordinator.collectives.in_process import InProcessCollective, InProcessGroup
from lockstep.coordinator.divergence import Recorder
from lockstep.coordinator.lanes import BallotShape, Voter
from lockstep.coordinator.operation import Phase
from lockstep.coordinator.prefetch_slots import PrefetchSlots, PrefetchSlotTable
from lockstep.coordinator.round import Rounds
from lockstep.errors import (
    CollectiveTimeout,
    DivergenceError,
    GroupError,
    InternalError,
    PeerLost,
    RankUnhealthy,
    UsageError,
)
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.config import Bounds, Timeouts
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn

T = TypeVar("T")

ROOM = 4

NO_SEATS: PrefetchSlotTable = PrefetchSlots(ROOM).freeze()

STEPS_MAX = 2000

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Exchanges:
    def __init__(self, group: InProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[list[tuple[str, int]]] = [[] for _ in range(group.world_size)]
        """For each rank: the kind and length of every value that the rank gave to a gather, in order.
        """
        give = group.give

        def watched(key: tuple[str, int], rank: int, value: Any) -> None:
            self.given[rank].append((key[0], len(value)))
            give(key, rank, value)

        monkeypatch.setattr(group, "give", watched)


def prompt(number: int, pages: int = 3) -> list[int]:
    start = number * 1000
    return list(range(start, start + pages * PAGE_TOKENS))


@DEPTHS
@pytest.mark.parametrize("wanted", [0, 1, 100, pytest.param(500, marks=pytest.mark.slow)])
def test_every_step_is_exactly_one_collective_of_one_shape_whatever_is_wanted(
    depth: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, R1: each step runs one collective of one length on all ranks, whatever the storage delays."""
    ranks = RanksInTurn(3, depth=depth, host_pages=2000)
    exchanges = Exchanges(ranks.group, monkeypatch)
    assert all(prefetch_everywhere(ranks, number) for number in range(wanted))
    seed = 7 * wanted + depth

    counts = counts_of_collectives(ranks, random.Random(seed))

    assert counts == [[step] * 3 for step in range(1, len(counts) + 1)], f"seed {seed}"
    length = ranks.caches[0].inspection.lanes
    assert exchanges.given == [[("round", length)] * len(counts)] * 3
    ended = ranks.every(lambda cache: cache.stats().operations)
    assert ended == ({"prefetch": {"complete": wanted}} if wanted else {})


@pytest.mark.parametrize(("depth", "after_a_step"), [(0, "TRANSFER"), (1, "QUERY")])
def test_a_step_applies_its_own_round_or_the_one_before_and_leaves_its_own_pending(
    depth: int, after_a_step: str
) -> None:
    ranks = RanksInTurn(2, depth=depth)
    ranks.every(lambda cache: cache.prefetch("a", prompt(1)))
    ranks.report(Answered(1, 3))

    ranks.step()

    assert ranks.phase(1) == after_a_step
    ranks.step()
    assert ranks.phase(1) == "TRANSFER"


def test_at_most_one_round_is_pending() -> None:
    """P3: a second `open` or `close` raises UsageError and changes nothing."""
    rounds = group_of_rounds(2)
    with pytest.raises(UsageError, match="open one first"):
        rounds[0].close()
    open_all(rounds)
    with pytest.raises(UsageError, match="close it first"):
        open_all(rounds[:1])

    assert [each.close().round for each in rounds] == [1, 1]
    open_all(rounds)
    assert [each.close().round for each in rounds] == [2, 2]


@DEPTHS
def test_ranks_of_any_speed_apply_each_round_at_the_same_step(depth: int) -> None:
    """P4: ranks run in threads with random storage delays; all replicas have the same history."""
    ranks = RanksInTurn(4, depth=depth, bounds=Bounds(prefetches=4))

    histories = in_threads(4, lambda rank: history_at_a_pace_of_its_own(ranks, rank))

    assert histories[1:] == histories[:1] * 3
    assert len(set(histories[0])) > 20


def test_a_round_that_times_out_ends_the_epoch_and_changes_nothing() -> None:
    ranks = RanksInTurn(3, timeouts=Timeouts(round_s=0.05))
    ranks.every(lambda cache: cache.prefetch("a", prompt(1)))
    ranks.report(Answered(1, 3))
    digest = ranks.caches[0].inspection.digest
    for cache in ranks.caches[:2]:
        cache.open_round()

    text = r"rank 2 did not join round 1 .*; a round may take 0.05 s \(timeouts.round_s\)$"
    with pytest.raises(CollectiveTimeout, match=text):
        ranks.caches[0].close_round()
    # Rank 0 has left the group before this, so rank 1 gets an error without waiting for the deadline.
    with pytest.raises(GroupError):
        ranks.caches[1].close_round()
    ranks.caches[2].open_round()
    with pytest.raises(PeerLost):
        one_more_round(ranks.caches[2])

    assert ranks.caches[0].inspection.digest == ranks.caches[1].inspection.digest == digest
    assert all(cache.inspection.ended_by is not None for cache in ranks.caches)


class Header(NamedTuple):
    epoch: int = 1
    rounds: int = 0
    digest: int = 5
    phase: Phase = Phase.QUERY


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        ("epoch", Header(epoch=2)),
        ("round", Header(rounds=7)),
        ("state digest", Header(digest=6)),
        ("layout digest", Header(phase=Phase.TRANSFER)),
    ],
)
def test_ranks_that_differ_in_the_header_end_in_the_same_round(field: str, odd: Header) -> None:
    """P5, R2: if headers differ, every rank notices in the same round and ignores the round's body."""
    headers = [Header(), Header(), odd]
    rounds = group_of_rounds(3, epochs=tuple(header.epoch for header in headers))

    def run(rank: int) -> str:
        header = headers[rank]
        prefetch_slots, (ballot,) = PrefetchSlots(ROOM), ballots_of(1)
        ballot.assign_slot(1, prefetch_slots.take(1, header.phase), header.phase)
        rounds[rank].count = header.rounds
        rounds[rank].open(
            prefetch_slots.freeze(), header.digest, ballot, Voter(healthy=True, time_ms=0)
        )
        with pytest.raises(DivergenceError) as raised:
            rounds[rank].close()
        assert rounds[rank].ended_by is raised.value
        return str(raised.value)

    messages = in_threads(3, run)

    assert messages[0].startswith(f"the ranks differ in {field}: ")
    assert len(set(messages)) == 1


@DEPTHS
def test_a_command_given_to_one_rank_alone_is_named_by_every_rank(depth: int) -> None:
    ranks = RanksInTurn(3, depth=depth)
    ranks.every(lambda cache: cache.prefetch("agreed", prompt(1)))
    ranks.step()
    before = [cache.inspection.journal.count for cache in ranks.caches]
    ranks.caches[1].prefetch("alone", prompt(2))
    ranks.report(Answered(1, 3))

    def run(rank: int) -> tuple[int, str]:
        cache = ranks.caches[rank]
        with pytest.raises(DivergenceError) as raised:
            steps(cache, 3)
        return cache.inspection.rounds, str(raised.value)

    ended = in_threads(3, run)

    assert len(set(ended)) == 1
    assert ended[0][0] == 2
    assert "the ranks differ in state digest and layout digest" in ended[0][1]
    assert f"the first entry that differs is number {before[0]} " in ended[0][1]
    assert "rank 1: request alone" in ended[0][1]
    # At depth 1, the ranks still apply the round before the difference, but not the differing round.
    assert {cache.inspection.in_flight[1].phase.name for cache in ranks.caches} == {"QUERY"}


@DEPTHS
def test_a_page_that_one_rank_lost_ends_the_epoch_in_the_next_round(depth: int) -> None:
    """P5, R3: free lists are replicated state, so a difference of one page shows in the next round."""
    ranks = RanksInTurn(2, depth=depth)
    ranks.compute("warm", prompt(1))
    ranks.caches[0].inspection.prefixes.allocator.pools[1][0].take(1)
    rounds = ranks.caches[0].inspection.rounds

    def run(rank: int) -> tuple[int, str]:
        with pytest.raises(DivergenceError) as raised:
            steps(ranks.caches[rank], 2)
        return ranks.caches[rank].inspection.rounds - rounds, str(raised.value)

    ended = in_threads(2, run)

    assert ended[0] == ended[1]
    assert ended[0][0] == 1
    assert "rank 1: nothing" in ended[0][1]


def test_a_transport_that_breaks_a_promise_of_ours_ends_the_epoch_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down(*_: object) -> None:
        raise InternalError("the shared memory begins with nonsense")

    rounds = group_of_rounds(2)
    open_all(rounds)
    monkeypatch.setattr(InProcessCollective, "receive", break_down)
    with pytest.raises(InternalError, match="nonsense") as first:
        rounds[0].close()

    assert rounds[0].ended_by is first.value
    with pytest.raises(InternalError, match="nonsense"):
        rounds[0].close()


def test_after_the_end_every_call_raises_the_same_error_and_reaches_no_collective() -> None:
    ranks = RanksInTurn(2)
    ranks.executors[0].ill = "the device fell off the bus"
    for cache in ranks.caches:
        cache.open_round()
    first = [ended_by(cache.close_round) for cache in ranks.caches]
    launches = [cache.stats().collectives for cache in ranks.caches]

    again = [
        [ended_by(call) for call in (cache.step, cache.open_round, cache.close_round, cache.flush)]
        for cache in ranks.caches
    ]

    assert again == [[error] * 4 for error in first]
    assert [cache.stats().collectives for cache in ranks.caches] == launches
    for cache in ranks.caches:
        cache.close()


def test_the_end_closes_the_transport_so_that_others_need_not_wait() -> None:
    """P8: a rank that is a round behind notices that the others have left, without a timeout."""
    group = InProcessGroup(2)
    rounds = group_of_rounds(2, group=group)
    for rank, each in enumerate(rounds):
        each.open(NO_SEATS, 0, ballots_of(1)[0], Voter(healthy=rank == 1, time_ms=0))
    for each in rounds:
        with pytest.raises(RankUnhealthy):
            each.close()

    for rank in range(2):
        with pytest.raises(PeerLost, match=f"rank {rank} has left"):
            group.give(("round", 2), rank, np.zeros(1, dtype=np.int64))


def counts_of_collectives(ranks: RanksInTurn, pace: random.Random) -> list[list[int]]:
    """Step until nothing is in flight, with random storage delays; count collectives per step."""
    counts: list[list[int]] = []
    while len(counts) < 5 or not ranks.caches[0].inspection.idle:
        for executor in ranks.executors:
            if pace.random() < 0.5:
                executor.complete(lambda key: True)
        ranks.step()
        counts.append([cache.stats().collectives for cache in ranks.caches])
        assert len(counts) < STEPS_MAX, "the prefetches do not end"
    return counts


def history_at_a_pace_of_its_own(ranks: RanksInTurn, rank: int) -> list[tuple[int, int]]:
    """Issue the commands on one rank, with random delays; return the rank's digests after each step."""
    cache, executor, pace = ranks.caches[rank], ranks.executors[rank], random.Random(rank)
    history: list[tuple[int, int]] = []
    for step in range(120):
        if step % 4 == 0 and step < 80:
            cache.prefetch(f"{step}", prompt(step))
        if step % 8 == 6:
            cache.abort(f"{step - 6}")
        if pace.random() < 0.4:
            executor.complete(lambda key: True)
        cache.step()
        history.append((cache.inspection.digest, cache.inspection.state_digest))
    return history


def ended_by(call: Callable[[], object]) -> RankUnhealthy:
    with pytest.raises(RankUnhealthy) as raised:
        call()
    return raised.value


def prefetch_everywhere(ranks: RanksInTurn, number: int) -> bool:
    return ranks.every(lambda cache: cache.prefetch(f"{number}", prompt(number)))


def ballots_of(world_size: int) -> list[Ballot]:
    shape = BallotShape(world_size=world_size, prefetch_slots=ROOM)
    return [Ballot(shape, rank) for rank in range(world_size)]


def group_of_rounds(
    world_size: int, *, group: InProcessGroup | None = None, epochs: tuple[int, ...] = ()
) -> list[Rounds]:
    group = group or InProcessGroup(world_size)
    members: list[InProcessCollective] = [group.member(rank) for rank in range(world_size)]
    return [
        Rounds(
            member,
            BallotShape(world_size=world_size, prefetch_slots=ROOM),
            timeout_s=20.0,
            recorder=Recorder(),
            epoch=epoch,
        )
        for member, epoch in zip(members, epochs or (1,) * world_size, strict=True)
    ]


def open_all(rounds: list[Rounds]) -> None:
    for each in rounds:
        each.open(NO_SEATS, 0, ballots_of(1)[0], Voter(healthy=True, time_ms=0))


def one_more_round(cache: Cache) -> None:
    cache.close_round()
    cache.step()


def steps(cache: Cache, number: int) -> None:
    for _ in range(number):
        cache.step()


def in_threads(world_size: int, run: Callable[[int], T]) -> list[T]:
    """Run every rank in a separate thread, because gathering blocks until all have joined."""
    with ThreadPoolExecutor(world_size) as pool:
        return [each.result(60) for each in [pool.submit(run, rank) for rank in range(world_size)]]
