"""What goes wrong in a store is a miss in vLLM: no wrong byte, no request for ever, no engine death."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from lockstep.integrations import blocking_store
from lockstep.integrations.vllm.tier import lookups, transfers
from tests.kit.held_store import HeldStore

from .conftest import Opens

if TYPE_CHECKING:
    from tests.kit.vllm.tier.tiering import Tiered

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def objects_in(tmp_path: Path) -> list[Path]:
    return sorted(each for each in (tmp_path / "store/objects").rglob("*") if each.is_file())


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2 + 5000] ^= 1
    path.write_bytes(damaged)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lose(path: Path) -> None:
    path.unlink()


def swap_header(path: Path) -> None:
    path.write_bytes(b"\x00" * 4096 + path.read_bytes()[4096:])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldStore]:
    """The store of all tiers, of any URI."""
    held = HeldStore()
    monkeypatch.setattr(blocking_store, "make_backend", held.of_any)
    monkeypatch.setattr(lookups, "LATE_S", 0.05)
    monkeypatch.setattr(transfers, "LATE_S", 0.05)
    yield held
    held.let_go()


@pytest.mark.parametrize("harm", [flip, cut, empty, lose, swap_header])
def test_a_harmed_object_is_a_miss_for_this_request_and_all_others(
    kit: ModuleType, tiered: "Tiered", tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    tiered.store(kit.keys(1))
    tiered.forget()
    tiered.know(kit.keys(1))
    for each in objects_in(tmp_path):
        harm(each)

    assert tiered.hits(kit.keys(1)) == [False]
    assert tiered.hits(kit.keys(1), kit.someone("another")) == [False]
    assert tiered.counted("lockstep_tier_chunks_read").keys() <= {" missing", " corrupt"}


@pytest.mark.parametrize("harm", [flip, cut, empty, lose, swap_header])
def test_a_harmed_object_is_read_once_and_then_computed_and_stored_anew(
    kit: ModuleType, tiered: "Tiered", tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    tiered.store(kit.keys(1))
    tiered.forget()
    tiered.know(kit.keys(1))
    for each in objects_in(tmp_path):
        harm(each)
    tiered.hits(kit.keys(1))
    again = kit.someone("again")
    tiered.store(kit.keys(1), again)
    tiered.forget()

    assert sum(tiered.counted("lockstep_tier_chunks_read").values()) == 1
    assert tiered.hits(kit.keys(1), kit.someone("later")) == [True]


def test_of_a_prefix_all_but_the_harmed_chunk_is_loaded(
    kit: ModuleType, tiered: "Tiered", tmp_path: Path
) -> None:
    tiered.store(kit.keys(1))
    tiered.settle()
    (first,) = objects_in(tmp_path)
    tiered.store(kit.keys(2, 3))
    tiered.forget()
    tiered.know(kit.keys(1, 2, 3))
    flip(first)

    assert tiered.hits(kit.keys(1, 2, 3)) == [False, True, True]


def test_half_of_the_objects_are_lost_and_the_other_half_is_loaded(
    kit: ModuleType, opens: Opens, store: str, tmp_path: Path
) -> None:
    numbers = range(40)
    tiered = opens(kit.tier_of(store), chunks=100)
    tiered.store(kit.keys(*numbers))
    tiered.forget()
    for each in objects_in(tmp_path)[::2]:
        each.unlink()

    hits = tiered.hits(kit.keys(*numbers))

    assert sum(hits) == 20
    tiered.store(kit.keys(*numbers), kit.someone("again"))
    tiered.forget()
    assert tiered.hits(kit.keys(*numbers), kit.someone("later")) == [True] * 40


def test_a_store_that_says_that_it_has_what_it_has_not_is_asked_once(
    kit: ModuleType, opens: Opens
) -> None:
    tiered = opens(kit.tier_of("fault+memory://?fault.lie=1"))

    assert tiered.hits(kit.keys(1, 2)) == [False, False]
    assert tiered.hits(kit.keys(1, 2), kit.someone("another")) == [False, False]
    assert tiered.counted("lockstep_tier_chunks_read") == {" missing": 2}


class Lines(logging.Handler):
    """What a logger says, once each, whether or not vLLM has made it pass on what it says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_a_store_that_fails_costs_nothing_but_misses_and_one_line(
    kit: ModuleType, opens: Opens
) -> None:
    tiered, lines = opens(kit.tier_of("fault+memory://?fault.error=1")), Lines()

    logging.getLogger("vllm.lockstep").addHandler(lines)
    for number in range(4):
        tiered.store(kit.keys(number))
        tiered.settle()
    logging.getLogger("vllm.lockstep").removeHandler(lines)
    tiered.forget()

    assert tiered.hits(kit.keys(0, 1, 2, 3)) == [False] * 4
    assert tiered.counted("lockstep_tier_chunks_written") == {" failed": 4}
    assert [each.partition(" (")[0] for each in lines.said] == [
        "chunks cannot be written in the store fault+memory://?fault.error=1"
    ]


def test_a_store_that_never_answers_in_time_costs_its_deadlines(
    kit: ModuleType, opens: Opens
) -> None:
    timeouts = {f"{each}_timeout_s": 0.05 for each in ("lookup", "read", "write")}
    tiered = opens(kit.tier_of("fault+memory://?fault.timeout=1", **timeouts))
    tiered.store(kit.keys(1))
    tiered.forget()

    assert tiered.hits(kit.keys(1)) == [False]


def test_a_lookup_that_hangs_is_a_miss_in_the_end(
    kit: ModuleType, opens: Opens, held: HeldStore
) -> None:
    tiered = opens(kit.tier_of("memory://", lookup_timeout_s=0.05, close_timeout_s=0.1))
    held.hold()

    assert tiered.hits(kit.keys(1)) == [False]


def test_a_read_that_hangs_gives_its_row_back_and_never_touches_it_again(
    kit: ModuleType, opens: Opens, held: HeldStore
) -> None:
    tiered = opens(kit.tier_of("memory://", read_timeout_s=0.05), chunks=1)
    tiered.store(kit.keys(1))
    tiered.forget()
    tiered.know(kit.keys(1))
    held.hold()
    first = tiered.hits(kit.keys(1))
    other = kit.someone("another")
    held.let_go()
    tiered.store(kit.keys(2), other)
    tiered.settle()

    assert first == [False]
    assert tiered.hits(kit.keys(2), other) == [True]


def test_a_write_that_hangs_lets_go_of_its_rows(
    kit: ModuleType, opens: Opens, held: HeldStore
) -> None:
    tiered = opens(kit.tier_of("memory://", write_timeout_s=0.05), chunks=1)
    held.hold()
    tiered.store(kit.keys(1))
    tiered.settle()
    tiered.store(kit.keys(2))

    assert tiered.hits(kit.keys(2)) == [True]


def test_a_reset_while_the_store_hangs_ends_in_time(
    kit: ModuleType, opens: Opens, held: HeldStore
) -> None:
    tiered = opens(kit.tier_of("memory://", write_timeout_s=0.05))
    held.hold()
    tiered.store(kit.keys(1))
    tiered.manager.reset_cache()

    assert tiered.jobs() == []


@pytest.mark.parametrize("reads", [False, True])
def test_an_engine_ends_while_the_store_hangs(
    kit: ModuleType, held: HeldStore, reads: bool
) -> None:
    tiered = kit.Tiered(kit.configuration(kit.tier_of("memory://", close_timeout_s=0.05)))
    tiered.store(kit.keys(1))
    tiered.forget()
    held.hold()
    submit = tiered.tier.submit_load if reads else tiered.tier.submit_store
    submit(kit.job(99, kit.keys(1), [0], reads=reads))
    region = tiered.spec._scheduler_mmap
    tiered.close()

    assert region.mmap_obj is None
    assert not Path(region.mmap_path).exists()


def test_no_fault_of_a_store_brings_other_bytes(kit: ModuleType, opens: Opens, store: str) -> None:
    rates = "&".join(
        f"fault.{kind}=0.1" for kind in ("error", "lost", "lie", "flip", "torn", "short", "wrong")
    )
    tiered = opens(kit.tier_of(f"fault+{store}?fault.seed=5&{rates}"), chunks=40)
    hits: list[bool] = []
    for turn in range(10):
        wanted = kit.keys(*range(turn * 20, turn * 20 + 20))
        tiered.store(wanted, kit.someone(f"writer {turn}"))
        tiered.forget()
        hits += tiered.hits(wanted, kit.someone(f"reader {turn}"))

    assert 20 < sum(hits) < 180


def test_many_requests_at_a_time_end_and_leave_nothing_behind(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    tiered = opens(kit.tier_of(store, in_flight_mib=0.02), chunks=64)
    requests = {each: kit.someone(f"request {each}") for each in range(30)}
    for number, request in requests.items():
        tiered.store(kit.keys(number, number + 1), request)
        tiered.step()
    tiered.forget()
    hits = [
        hit
        for number, request in requests.items()
        for hit in tiered.hits(kit.keys(number, number + 1), request)
    ]
    for request in requests.values():
        tiered.manager.on_request_finished(request)
    tiered.settle()

    assert hits == [True] * 60
    assert (tiered.remembered(), tiered.jobs()) == (0, [])


def test_a_tier_keeps_no_more_than_its_quota(kit: ModuleType, opens: Opens, store: str) -> None:
    stored = kit.CHUNK_BYTES + 4096
    tiered = opens(kit.tier_of(store, quota_gib=3 * stored / (1 << 30)), chunks=16)
    for number in range(8):
        tiered.store(kit.keys(number))
        tiered.settle()
    held = tiered.counted("lockstep_tier_held")
    tiered.forget()

    assert held == {"bytes": 3 * stored}
    assert tiered.hits(kit.keys(*range(8))) == [False] * 5 + [True] * 3
