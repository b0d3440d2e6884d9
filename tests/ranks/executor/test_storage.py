"""Lookups, fetches and persists: their progress reports, the end of their I/O, and their bounds."""

import asyncio
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from lockstep.coordinator.ballot import (
    Answered,
    Capped,
    Expired,
    Landed,
    Quiesced,
    QuiesceExpired,
    TransferEnded,
)
from lockstep.errors import UsageError
from lockstep.page_format.object_name import ObjectName, object_path
from lockstep.page_format.page_layout import ShardLayout
from lockstep.ranks.executor import executor as rank_executor
from lockstep.ranks.executor import pace
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.lookup import LOOKUP_KEYS
from lockstep.ranks.executor.pace import Pace
from lockstep.ranks.protocol.orders import KV_POOL, Cancel, Fetch, LookUp, Need, ObjectTransfer, Put
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.wrappers.base import Call
from tests.kit.ranks.executor_parts import (
    LONG_S,
    NAMESPACE,
    PATIENCE_S,
    HeldStore,
    happened,
    includes,
    key_outcomes,
    keys,
    make_executor,
    mixed_layout,
    objects,
    plain_layout,
    random_bytes,
    to_device,
    to_host,
    waited,
)
from tests.kit.storage.calls import digest_of
from tests.kit.waiting import wait_for

SOON_S = 0.02
ONE_CALL_BYTES = 4 << 20
"""Bytes of a page so large that a store call moves one page only."""

Start = Callable[..., RankExecutor]


def look_up(operation: int, keys: tuple[bytes, ...], timeout_s: float) -> LookUp:
    return LookUp(operation, 0, (Need(KV_POOL, 0, keys),), timeout_s)


@pytest.fixture
def start(made: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    # Fix the size of a call, because the tests count the store's calls.
    monkeypatch.setattr(pace, "CALL_BYTES_MAX", ONE_CALL_BYTES)
    held: list[HeldStore] = []

    def make(
        layout: ShardLayout,
        backend: StorageBackend | None,
        host_pages: int = 8,
        inflight_bytes: int = 64 << 20,
    ) -> RankExecutor:
        if isinstance(backend, HeldStore):
            held.append(backend)
        return made(layout, backend=backend, host_pages=host_pages, inflight_bytes=inflight_bytes)

    yield make
    for store in held:
        store.let_go()


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StorageBackend:
    return make_backend("memory://" if request.param == "memory" else f"file://{tmp_path}")


def persisted(executor: RankExecutor, count: int, operation: int = 1000) -> list[bytes]:
    for slot in range(count):
        size = executor.host_pool.layout.page_bytes
        executor.host_pool.page(slot)[:] = random_bytes((size,), slot).numpy().tobytes()
    contents = [bytes(executor.host_pool.page(slot)) for slot in range(count)]
    order = Put(operation, objects(count), LONG_S)
    happened(executor, [order], includes(TransferEnded(operation, ok=True)))
    return contents


def used_ns(executor: RankExecutor, root: Path, count: int) -> list[int]:
    """Return the last-use times of a prompt's first pages, read from the files of the store."""
    shard = executor.host_pool.layout.name
    names = [ObjectName(NAMESPACE, key.hex(), KV_POOL, shard) for key in keys(count)]
    return [
        (root / object_path(name.namespace, digest_of(name))).stat().st_mtime_ns for name in names
    ]


def test_a_fetch_brings_back_the_bytes_that_a_persist_wrote(
    start: Start, store: StorageBackend
) -> None:
    executor = start(mixed_layout(), store, host_pages=300)
    contents = persisted(executor, 150)

    progress = happened(
        executor, [Fetch(2, objects(150, first_page=150), LONG_S)], includes(Landed(2, 150))
    )

    assert [bytes(executor.host_pool.page(150 + page)) for page in range(150)] == contents
    assert all(isinstance(each, Landed) for each in progress)
    moved = executor.counts().bytes_moved
    total = 150 * executor.host_pool.layout.page_bytes
    assert moved.l2_to_l3 == total
    happened(executor, [Cancel(2, LONG_S)], includes(Quiesced(2)))
    assert executor.counts().bytes_moved.l3_to_l2 == total


def test_whatever_writes_to_a_host_page_ends_its_leases_and_no_other(
    start: Start, store: StorageBackend
) -> None:
    executor = start(mixed_layout(), store, host_pages=8)
    persisted(executor, 2)
    leases = executor.host_pool.leases(range(8))

    happened(executor, [to_host(2, [0], [4])], includes(TransferEnded(2, ok=True)))
    happened(executor, [to_device(3, [5], [1])], includes(TransferEnded(3, ok=True)))
    happened(executor, [Fetch(4, objects(2, first_page=6), LONG_S)], includes(Landed(4, 2)))

    assert [each.slot for each in leases if not each.is_current] == [4, 6, 7]


def test_a_persist_of_what_is_there_already_is_ok_and_writes_nothing(
    start: Start, store: StorageBackend
) -> None:
    executor = start(mixed_layout(), store)
    persisted(executor, 4)
    before = executor.counts().bytes_moved.l2_to_l3

    happened(executor, [Put(2, objects(4), LONG_S)], includes(TransferEnded(2, ok=True)))

    assert executor.counts().bytes_moved.l2_to_l3 == before
    assert key_outcomes(executor, Call.WRITE)["present"] == 4


def test_pages_count_as_used_when_the_page_was_that_they_continue_and_each_before_the_next(
    start: Start, tmp_path: Path
) -> None:
    executor = start(mixed_layout(), make_backend(f"file://{tmp_path}"), host_pages=1500)
    persisted(executor, 700)
    older = used_ns(executor, tmp_path, 700)
    (again, more) = structs.replace(objects(700)[0], stored=True), objects(800, first_key=700)[0]

    happened(executor, [Put(2, (again,), LONG_S)], includes(TransferEnded(2, ok=True)))
    happened(
        executor,
        [Put(3, (more,), LONG_S, after=again.keys[-1], distance=1)],
        includes(TransferEnded(3, ok=True)),
    )

    times = used_ns(executor, tmp_path, 1500)
    assert times[699] > max(older)
    assert times == sorted(times, reverse=True)


def test_a_lookup_answers_with_the_number_of_leading_keys(
    start: Start, store: StorageBackend
) -> None:
    executor = start(mixed_layout(), store)
    persisted(executor, 3)
    happened(
        executor,
        [Put(2, objects(2, first_key=4, first_page=4), LONG_S)],
        includes(TransferEnded(2, ok=True)),
    )

    progress = happened(
        executor,
        [look_up(3, keys(6), LONG_S), look_up(4, keys(1, first=9), LONG_S)],
        lambda progress: len(progress) == 2,
    )

    assert set(progress) == {Answered(3, 3), Answered(4, 0)}


def test_a_long_lookup_asks_no_further_than_the_first_missing_key(start: Start) -> None:
    store = HeldStore()
    executor = start(mixed_layout(), store)
    persisted(executor, 2)

    progress = happened(executor, [look_up(2, keys(5 * LOOKUP_KEYS), LONG_S)], bool)

    assert progress == [Answered(2, 2)]
    assert store.exists_calls == 1


def test_a_missing_page_caps_a_fetch_and_the_pages_before_it_still_land(
    start: Start, store: StorageBackend
) -> None:
    executor = start(mixed_layout(), store)
    persisted(executor, 3)

    progress = happened(
        executor, [Fetch(2, objects(5), LONG_S)], includes(Landed(2, 3), Capped(2, 3))
    )

    assert max(each.pages for each in progress if isinstance(each, Landed)) == 3
    assert key_outcomes(executor, Call.READ)["missing"] >= 1


def test_a_corrupt_page_is_a_miss_and_never_data(start: Start) -> None:
    shelf = Shelf()
    executor = start(mixed_layout(), MemoryBackend(shelf))
    persisted(executor, 1)
    digest, (header, payload) = next(iter(shelf.objects.items()))
    shelf.objects[digest] = (header, bytes([payload[0] ^ 1]) + payload[1:])

    progress = happened(executor, [Fetch(2, objects(1), LONG_S)], includes(Capped(2, 0)))

    assert not any(isinstance(each, Landed) for each in progress)
    assert executor.counts().pages_corrupt == 1


def test_batches_that_end_out_of_order_are_reported_as_a_growing_prefix(start: Start) -> None:
    store = HeldStore()
    executor = start(plain_layout(ONE_CALL_BYTES), store, host_pages=4)
    persisted(executor, 4)
    store.forget_entered()
    first, _, third, _ = keys(4)
    store.hold(first, third)

    executor.carry_out([Fetch(2, objects(4), LONG_S)])
    for _ in range(4):
        store.next_entered()
    assert waited_for_nothing(executor)
    store.let_go(first)
    assert waited(executor, includes(Landed(2, 2)))[-1] == Landed(2, 2)
    store.let_go(third)
    assert waited(executor, includes(Landed(2, 4)))[-1] == Landed(2, 4)


def waited_for_nothing(executor: RankExecutor) -> bool:
    executor.wait(SOON_S)
    return executor.progress() == []


def test_batches_beyond_the_cap_are_not_read(start: Start) -> None:
    store = HeldStore()
    executor = start(
        plain_layout(ONE_CALL_BYTES), store, host_pages=4, inflight_bytes=ONE_CALL_BYTES
    )

    happened(executor, [Fetch(1, objects(4), LONG_S)], includes(Capped(1, 0)))

    assert happened(executor, [Cancel(1, LONG_S)], bool) == [Quiesced(1)]
    assert store.entered.qsize() == 1


def test_an_operation_is_quiet_only_when_its_last_call_has_returned(start: Start) -> None:
    store = HeldStore(stubborn=True)
    store.hold(*keys(1))
    executor = start(mixed_layout(), store)
    executor.carry_out([Fetch(1, objects(1), LONG_S)])
    store.next_entered()

    assert happened(executor, [Cancel(1, SOON_S)], bool) == [QuiesceExpired(1)]

    assert waited_for_nothing(executor)
    store.let_go()
    assert waited(executor, includes(Quiesced(1)))[-1] == Quiesced(1)


def test_a_call_that_can_be_cancelled_is_quiet_at_once(start: Start) -> None:
    store = HeldStore()
    store.hold(*keys(1))
    executor = start(mixed_layout(), store)
    executor.carry_out([Fetch(1, objects(1), LONG_S)])
    store.next_entered()

    progress = happened(executor, [Cancel(1, LONG_S)], includes(Quiesced(1)))

    assert progress == [Capped(1, 0), Quiesced(1)]


def test_a_cancel_drops_the_batches_that_have_not_begun(start: Start) -> None:
    store = HeldStore()
    store.hold(*keys(8))
    executor = start(
        plain_layout(ONE_CALL_BYTES), store, host_pages=8, inflight_bytes=2 * ONE_CALL_BYTES
    )
    executor.carry_out([Put(1, objects(8), LONG_S)])
    began = [store.next_entered() for _ in range(2)]

    progress = happened(executor, [Cancel(1, LONG_S)], includes(Quiesced(1)))

    assert progress == [TransferEnded(1, ok=False), Quiesced(1)]
    assert began == [(key.hex(),) for key in keys(2)]
    assert store.entered.empty()


def test_an_operation_that_has_ended_or_never_was_is_quiet_at_once(start: Start) -> None:
    executor = start(mixed_layout(), MemoryBackend())
    persisted(executor, 2, operation=1)

    executor.carry_out([Cancel(1, LONG_S), Cancel(77, LONG_S)])

    assert executor.progress() == [Quiesced(1), Quiesced(77)]


class LoopWithAClockOfItsOwn(asyncio.SelectorEventLoop):
    """An event loop whose clock is far ahead of `time.monotonic`, as a custom loop's may be."""

    def time(self) -> float:
        return super().time() + 100 * LONG_S


def test_deadlines_are_kept_by_one_clock_whatever_the_loops_own_one_says(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", LoopWithAClockOfItsOwn)
    executor = start(mixed_layout(), MemoryBackend())

    happened(executor, [Put(1, objects(2), LONG_S)], includes(TransferEnded(1, ok=True)))

    happened(executor, [look_up(2, keys(2), LONG_S)], includes(Answered(2, 2)))


def test_a_persist_whose_time_is_up_has_failed_and_is_quiet_later(start: Start) -> None:
    store = HeldStore(stubborn=True)
    store.hold(*keys(1))
    executor = start(mixed_layout(), store)

    assert happened(executor, [Put(1, objects(2), SOON_S)], bool) == [TransferEnded(1, ok=False)]

    executor.carry_out([Cancel(1, LONG_S)])
    assert executor.progress() == []
    store.let_go()
    assert waited(executor, bool) == [Quiesced(1)]


def test_a_lookup_whose_store_hangs_expires(start: Start) -> None:
    store = HeldStore(stubborn=True)
    store.hold(*keys(1))
    executor = start(mixed_layout(), store)

    assert happened(executor, [look_up(1, keys(1), SOON_S)], bool) == [Expired(1)]

    store.let_go()
    assert happened(executor, [look_up(2, keys(1), LONG_S)], bool) == [Answered(2, 0)]


class FaultyStore(MemoryBackend):
    """A store whose read raises, although the contract forbids exceptions."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self._fault = fault

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        raise self._fault


def test_a_store_that_raises_fails_the_operation_and_not_the_rank(start: Start) -> None:
    executor = start(mixed_layout(), FaultyStore(ValueError("a bug of the store's")))
    persisted(executor, 2)

    assert happened(executor, [Fetch(2, objects(2), LONG_S)], bool) == [Capped(2, 0)]

    assert executor.trouble() is None
    answer = happened(executor, [look_up(3, keys(3), LONG_S)], bool)
    assert answer == [Answered(3, 2)]


def test_a_storage_loop_that_has_died_is_trouble_and_its_orders_fail(start: Start) -> None:
    executor = start(mixed_layout(), FaultyStore(SystemExit("gone")))
    persisted(executor, 1)

    assert happened(executor, [Fetch(2, objects(1), LONG_S)], bool) == [Capped(2, 0)]

    assert "storage loop" in str(executor.trouble())
    progress = happened(
        executor,
        [
            look_up(3, keys(1), LONG_S),
            Fetch(4, objects(1), LONG_S),
            Put(5, objects(1), LONG_S),
        ],
        lambda progress: len(progress) == 3,
    )
    assert progress == [Answered(3, 0), Capped(4, 0), TransferEnded(5, ok=False)]
    assert happened(executor, [Cancel(2, SOON_S)], bool) == [QuiesceExpired(2)]


class DeadlyToAsk(HeldStore):
    """A store whose lookup kills the storage thread."""

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        raise SystemExit("gone")


def test_a_storage_loop_that_dies_says_so_though_one_of_its_calls_does_not_return(
    start: Start,
) -> None:
    store = DeadlyToAsk(stubborn=True)
    store.hold(*keys(1))
    executor = start(mixed_layout(), store)
    executor.carry_out([Fetch(1, objects(1), LONG_S)])
    store.next_entered()

    progress = happened(
        executor, [look_up(2, keys(1), LONG_S)], lambda progress: len(progress) == 2
    )

    assert set(progress) == {Capped(1, 0), Answered(2, 0)}
    assert "storage loop" in str(executor.trouble())


def test_a_page_that_the_pool_does_not_have_fails_its_operation_alone(start: Start) -> None:
    executor = start(mixed_layout(), MemoryBackend(), host_pages=2)
    wrong = (ObjectTransfer(KV_POOL, keys(1), (2,)),)

    progress = happened(
        executor,
        [Fetch(1, wrong, LONG_S), Put(2, wrong, LONG_S)],
        lambda progress: len(progress) == 2,
    )

    assert set(progress) == {Capped(1, 0), TransferEnded(2, ok=False)}


def test_the_bytes_in_flight_stay_within_their_bound(start: Start) -> None:
    store = HeldStore()
    executor = start(
        plain_layout(ONE_CALL_BYTES), store, host_pages=8, inflight_bytes=3 * ONE_CALL_BYTES
    )
    store.hold(*keys(8))

    executor.carry_out([Put(1, objects(5), LONG_S), Put(2, objects(3, first_key=5), LONG_S)])
    began = [store.next_entered() for _ in range(3)]
    assert store.entered.empty()
    for finished in keys(2):
        store.let_go(finished)
        began.append(store.next_entered())
    store.let_go()
    waited(executor, includes(TransferEnded(1, ok=True), TransferEnded(2, ok=True)))

    assert [int(key, 16) for (key,) in began] == [0, 5, 1, 6, 2], "operations do not take turns"
    assert store.bytes_running_max == 3 * ONE_CALL_BYTES


def test_a_page_larger_than_the_bound_goes_alone(start: Start) -> None:
    store = HeldStore()
    executor = start(mixed_layout(), store, inflight_bytes=1)

    persisted(executor, 3)

    assert store.bytes_running_max == executor.host_pool.layout.page_bytes


def test_close_ends_in_time_although_the_store_hangs() -> None:
    store = HeldStore(stubborn=True)
    store.hold(*keys(1))
    executor = make_executor(mixed_layout(), backend=store, close_timeout_s=0.2)
    executor.carry_out([Fetch(1, objects(1), LONG_S)])
    store.next_entered()

    executor.close()
    executor.close()

    assert store.closed.wait(PATIENCE_S), "the store is closed although a call never returns"
    with pytest.raises(UsageError, match="closed"):
        executor.carry_out([Cancel(1, LONG_S)])
    store.let_go()
    assert waited(executor, includes(Capped(1, 0)))


@contextmanager
def alarm_soon(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Send SIGALRM to this process shortly after the `with` block begins; `handler` handles it."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, SOON_S)
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signal_may_close_the_executor_in_the_middle_of_a_wait() -> None:
    store = HeldStore()
    store.hold(*keys(1))
    executor = make_executor(mixed_layout(), backend=store)
    executor.carry_out([Fetch(1, objects(1), LONG_S)])
    store.next_entered()

    def close(number: int, frame: FrameType | None) -> None:
        executor.close()

    with alarm_soon(close):
        executor.wait(PATIENCE_S)

    assert store.closed.is_set()
    assert executor.progress() == [Capped(1, 0)]


def three_mib(pace: Pace, nbytes: int, now: float) -> None:
    """Stand-in that advises a call size of 3 MiB, instead of an estimate from past calls."""
    pace.call_bytes = 3 << 20


def test_a_call_to_the_store_moves_what_its_pace_allows(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HeldStore()
    monkeypatch.setattr(Pace, "end", three_mib)
    executor = start(plain_layout(1 << 20), store, host_pages=8)

    persisted(executor, 8)
    happened(executor, [Fetch(2, objects(8), LONG_S)], includes(Landed(2, 8)))
    store.forget_entered()
    happened(executor, [Fetch(3, objects(8), LONG_S)], includes(Landed(3, 8)))

    calls = [[int(key, 16) for key in store.next_entered()] for _ in range(3)]
    assert sorted(calls) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_an_answer_in_time_counts_though_the_engine_computed_until_after_the_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = start(plain_layout(64), MemoryBackend())
    persisted(executor, 2)
    inbox: Any = executor

    executor.carry_out([look_up(2, keys(2), LONG_S)])
    wait_for(lambda: not inbox._inbox.empty(), "an answer")
    later = time.monotonic() + 2 * LONG_S
    monkeypatch.setattr(rank_executor, "time", SimpleNamespace(monotonic=lambda: later))
    executor.wait(0.0)

    assert executor.progress() == [Answered(2, 2)]


def test_a_wait_gathers_how_far_a_fetch_has_come(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_executor, "_GATHER_S", LONG_S)
    executor = start(plain_layout(ONE_CALL_BYTES), HeldStore(), host_pages=8)
    persisted(executor, 8)

    executor.carry_out([Fetch(2, objects(8), LONG_S)])
    executor.wait(LONG_S)

    assert executor.progress()[-1] == Landed(2, 8)


def test_a_wait_ends_soon_for_what_lands_after_the_fetch_was_capped(start: Start) -> None:
    """A wait for a fetch ends early if no more pages can land, even if some are missing."""
    store = HeldStore()
    executor = start(plain_layout(ONE_CALL_BYTES), store, host_pages=4)
    persisted(executor, 1)
    store.forget_entered()
    (first,) = keys(1)
    store.hold(first)

    happened(executor, [Fetch(2, objects(2), LONG_S)], includes(Capped(2, 1)))
    store.let_go(first)
    executor.wait(LONG_S)

    assert executor.progress() == [Landed(2, 1)]
