"""Jobs between an engine's memory and a store end in time, and touch no row after that."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from lockstep.integrations.blocking_store import BlockingStore
from lockstep.integrations.vllm.tier import transfers
from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from tests.kit.held_store import HeldStore
from tests.kit.vllm.tier.transfer_bench import ROWS, Bench, keys, values
from tests.kit.waiting import wait_for

Opens = Callable[..., Bench]


@pytest.fixture(autouse=True)
def late_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """How much later than its deadline a job ends without its store."""
    monkeypatch.setattr(transfers, "LATE_S", 0.05)
    return 0.05


@pytest.fixture
def held() -> Iterator[HeldStore]:
    held = HeldStore()
    yield held
    held.let_go()


@pytest.fixture
def opens(held: HeldStore) -> Iterator[Opens]:
    """Opens benches over one store, or over that of a URI."""
    with ExitStack() as stack:

        def opens(uri: str | None = None, **options: float) -> Bench:
            around = None if uri else held.of_any
            store = BlockingStore(uri or "memory://", "a test", around)
            stack.enter_context(closing(store))
            bench = Bench(store, **options)  # type: ignore[arg-type]
            store.open(bench.transfers.memory, 10.0, close_timeout_s=0.1)
            stack.callback(bench.transfers.close)
            return bench

        yield opens
        held.let_go()


@pytest.mark.parametrize(
    "uri",
    [
        "memory://",
        "file://{folder}/kv",
        "file://{folder}/kv?direct=1&durability=full",
        "metrics+retry+breaker+limit+file://{folder}/kv",
        "3fs://{folder}/kv?index=sqlite://{folder}/index",
    ],
)
def test_chunks_come_back_byte_for_byte_in_other_rows_from_any_store(
    opens: Opens, tmp_path: Path, uri: str
) -> None:
    (tmp_path / "kv").mkdir()
    bench = opens(uri.format(folder=tmp_path))
    (written,) = bench.written(keys(1, 2, 3), [0, 1, 2])
    bench.rows[:] = 0
    bench.read(1, keys(3, 1, 2), [7, 5, 6])

    (read,) = bench.ended()

    assert (written.went_well, read.went_well) == (True, True)
    assert values(bench) == [0, 0, 0, 0, 0, 1, 2, 3]


def test_a_job_without_chunks_goes_well(opens: Opens) -> None:
    (ended,) = opens().written([], [])

    assert ended.went_well


def test_jobs_are_told_apart_by_their_numbers(opens: Opens) -> None:
    bench = opens()
    bench.write(7, keys(1), [0])
    bench.write(9, keys(2), [1])

    assert {each.number: each.went_well for each in bench.ended()} == {7: True, 9: True}
    assert bench.ended() == []


def test_a_second_writer_of_a_chunk_goes_well_too(opens: Opens) -> None:
    bench = opens()
    bench.written(keys(1), [0])

    (again,) = bench.written(keys(1), [0])

    assert again.went_well
    assert again.outcomes == [WriteOutcome.PRESENT]


def test_a_chunk_that_is_missing_fails_alone_and_leaves_its_row_alone(opens: Opens) -> None:
    bench = opens()
    bench.written(keys(1, 3), [0, 2])
    bench.read(1, keys(1, 2, 3), [4, 5, 6])

    (read,) = bench.ended()

    assert not read.went_well
    assert (read.well(), read.not_well()) == (keys(1, 3), keys(2))
    assert values(bench) == [1, 2, 3, 4, 1, 6, 3, 8]


@pytest.mark.parametrize("rows", [[8], [-1], [0, 1], []])
@pytest.mark.parametrize("reads", [False, True])
def test_rows_that_make_no_sense_fail_the_job(opens: Opens, rows: list[int], reads: bool) -> None:
    bench = opens()
    bench.transfers.begin(1, keys(1), rows, reads=reads)

    (ended,) = bench.ended()

    assert (ended.went_well, ended.was_refused) == (False, True)


def test_jobs_larger_than_the_memory_for_them_go_in_parts(opens: Opens) -> None:
    bench = opens(in_flight_rows=2)
    (written,) = bench.written(keys(*range(ROWS)), range(ROWS))
    bench.rows[:] = 0
    bench.read(1, keys(*range(ROWS)), range(ROWS))

    (read,) = bench.ended()

    assert (written.went_well, read.went_well) == (True, True)
    assert values(bench) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_many_jobs_at_a_time_share_little_memory(opens: Opens) -> None:
    bench = opens(in_flight_rows=1)
    bench.written(keys(*range(ROWS)), range(ROWS))
    bench.rows[:] = 0
    for number in range(ROWS):
        bench.read(number, keys(number), [number])

    ended = bench.ended()

    assert [each.went_well for each in ended] == [True] * ROWS
    assert values(bench) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_read_that_hangs_ends_late_and_touches_no_row_afterwards(
    opens: Opens, held: HeldStore, late_s: float
) -> None:
    bench = opens(limit_s=0.01)
    opens().written(keys(1), [0])
    held.hold()
    bench.read(1, keys(1), [5])

    (read,) = bench.ended()
    bench.rows[:] = 77
    held.let_go()
    bench.store.close()

    assert read.outcomes == [ReadOutcome.TIMED_OUT]
    assert read.took_s >= late_s
    assert values(bench) == [77] * ROWS


def test_a_write_that_hangs_ends_late_and_stores_what_the_row_held_then(
    opens: Opens, held: HeldStore
) -> None:
    bench = opens(limit_s=0.01)
    held.hold()
    bench.write(1, keys(1), [2])
    assert held.asked.wait(10)

    (written,) = bench.ended()
    bench.rows[:] = 77
    held.let_go()
    wait_for(lambda: bool(held.shelf.objects))
    later = opens()
    later.read(2, keys(1), [6])
    (read,) = later.ended()

    assert written.outcomes == [WriteOutcome.TIMED_OUT]
    assert read.went_well
    assert values(later)[6] == 3


def test_a_job_that_hangs_keeps_its_memory_and_leaves_the_rest_to_others(
    opens: Opens, held: HeldStore
) -> None:
    bench = opens(in_flight_rows=2)
    opens().written(keys(1, 2), [0, 1])
    held.hold(calls=1)
    bench.read(1, keys(1), [5])
    assert held.asked.wait(10)
    for number in range(2, 5):
        bench.read(number, keys(2), [6])
    over = bench.first(3)
    held.let_go()
    (last,) = bench.ended()

    assert [(each.number, each.went_well) for each in over] == [(2, True), (3, True), (4, True)]
    assert (last.number, last.went_well) == (1, True)


def test_a_job_that_finds_no_memory_by_its_deadline_fails(opens: Opens, held: HeldStore) -> None:
    bench = opens(in_flight_rows=1, limit_s=0.05)
    held.hold()
    bench.read(1, keys(1), [5])
    bench.read(2, keys(2), [6])

    ended = bench.ended()

    assert [each.outcomes for each in ended] == [[ReadOutcome.TIMED_OUT]] * 2


def test_writes_pin_half_of_the_rows_and_reads_any(opens: Opens, held: HeldStore) -> None:
    bench = opens()
    held.hold()
    bench.write(1, keys(1, 2, 3), [0, 1, 2])
    bench.write(2, keys(4), [3])
    bench.write(3, keys(5), [4])
    bench.read(4, keys(*range(8)), range(8))

    refused = [each.number for each in bench.transfers.ended() if each.was_refused]
    held.let_go()
    bench.ended()
    bench.write(5, keys(5), [4])

    assert refused == [3]
    assert [each.went_well for each in bench.ended()] == [True]


def test_one_job_may_pin_more_where_nothing_else_does(opens: Opens) -> None:
    (ended,) = opens().written(keys(*range(ROWS)), range(ROWS))

    assert ended.went_well


def test_after_close_jobs_fail_at_once_and_the_memory_is_let_go(opens: Opens) -> None:
    bench = opens()
    bench.transfers.close()
    bench.transfers.close()
    bench.read(1, keys(1), [0])

    (ended,) = bench.ended()

    assert (ended.was_refused, ended.outcomes) == (True, [ReadOutcome.FAILED])


def test_a_job_in_flight_at_the_end_touches_nothing_any_more(opens: Opens, held: HeldStore) -> None:
    bench = opens()
    opens().written(keys(1), [0])
    held.hold()
    bench.read(1, keys(1), [5])
    assert held.asked.wait(10)

    bench.transfers.close()
    bench.rows[:] = 77
    held.let_go()
    bench.store.close()

    assert values(bench) == [77] * ROWS


def test_a_store_that_is_closed_fails_every_job(opens: Opens) -> None:
    bench = opens()
    bench.store.close()
    bench.write(1, keys(1), [0])

    (ended,) = bench.ended()

    assert (ended.was_refused, ended.outcomes) == (True, [WriteOutcome.FAILED])


def test_a_store_that_raises_against_its_promise_fails_the_job(
    held: HeldStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(HeldStore):
        async def write(self, *_: object, **__: object) -> list[WriteOutcome]:
            raise RuntimeError("broken")

    def around(_: StorageBackend) -> StorageBackend:
        return Raising(held.shelf)

    store = BlockingStore("memory://", "a test", around)
    bench = Bench(store)
    store.open([], 10.0)
    with closing(store), caplog.at_level(logging.WARNING, "vllm.lockstep"):
        (ended,) = bench.written(keys(1), [0])

    assert ended.outcomes == [WriteOutcome.FAILED]
    assert "broken" in caplog.text


FAULTS = ("error", "lost", "lie", "flip", "torn", "short", "wrong")


def test_no_fault_of_a_store_brings_other_bytes(opens: Opens) -> None:
    rates = "&".join(f"fault.{kind}=0.15" for kind in FAULTS)
    bench = opens(f"fault+memory://?fault.seed=3&{rates}")
    before = values(bench)
    right: list[bool] = []
    for turn in range(20):
        bench.written(keys(*range(turn * ROWS, turn * ROWS + ROWS)), range(ROWS))
    for turn in range(20):
        bench.rows[:] = 0
        bench.read(turn, keys(*range(turn * ROWS, turn * ROWS + ROWS)), range(ROWS))
        (read,) = bench.ended()
        moved = [outcome.name == "OK" for outcome in read.outcomes]
        right += [
            each == (number if well else 0)
            for each, number, well in zip(values(bench), before, moved, strict=True)
        ]

    assert right == [True] * 20 * ROWS
