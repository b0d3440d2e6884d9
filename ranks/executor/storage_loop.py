"""The one thread of a rank that talks to its store (L3), on an event loop that owns the backend.

The engine's thread hands orders in and never waits. Reports go out through one function. Deadlines
are the executor's (`executor.py`), which does not depend on this thread to notice that time is up;
here they only keep work from being begun that would be too late.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ...coordinator.ballot import Answered, Capped, Expired, Progress, TransferEnded
from ...errors import ConfigError, StorageError
from ...storage_backends.base import StorageBackend
from ...storage_backends.error_log import LoggedError
from ...storage_backends.wrappers.metrics import CallLog, MetricsBackend
from ..protocol.orders import Cancel, Fetch, LookUp, Put
from .inflight_bytes import InflightBytes
from .late_calls import LateCallsLog, answer_by
from .lookup import StoreLookUp
from .pace import Pace
from .storage_transfers import (
    Batch,
    FetchTransfer,
    PersistTransfer,
    RankObjects,
    Transfer,
    outcomes_of,
)

_log = logging.getLogger(__name__)

OPERATION: ContextVar[int] = ContextVar("operation", default=0)
"""The operation that the running task calls the store for."""


@dataclass(frozen=True, slots=True)
class StorageQuiet:
    """No call of the backend touches the operation's pages any more. Said once, and last."""

    operation: int
    bytes_fetched: int
    bytes_persisted: int


StorageOrder = LookUp | Fetch | Put | Cancel
StorageReport = Progress | StorageQuiet


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """An order and when its time is up, on `time.monotonic`'s scale."""

    order: StorageOrder
    deadline: float


def refusal(order: StorageOrder) -> list[StorageReport]:
    """Return the reports of an order that no store is there to carry out.

    Of a source it is said, too, that no time changes that: it has promised what is asked for.
    """
    match order:
        case LookUp():
            expired = [Expired(order.operation)] if order.source else []
            return [*expired, Answered(order.operation, 0)]
        case Fetch():
            return [Capped(order.operation, 0), StorageQuiet(order.operation, 0, 0)]
        case Put():
            return [TransferEnded(order.operation, ok=False), StorageQuiet(order.operation, 0, 0)]
        case Cancel():
            return []


class StorageLoop:
    """Carries out lookups, fetches and persists against one backend.

    Reports, from its own thread: `Answered`; `Landed` and `Capped` as they change; `TransferEnded` for
    persists; and `StorageQuiet` when an operation's last call has returned, however late that is. A
    cancelled operation begins nothing more, and its running calls are cancelled, but it is quiet
    only when they have returned (contract S3).
    """

    def __init__(
        self,
        make_backend: Callable[[], StorageBackend],
        objects: RankObjects,
        report: Callable[[StorageReport], None],
        *,
        room: InflightBytes,
        late: LateCallsLog,
        calls: CallLog,
    ) -> None:
        """`make_backend` is called on the loop's thread: what it imports can take a while.

        `room` and `late` are those of all stores of the rank, and `calls` is that of all of its kind.
        """
        self._make_backend = make_backend
        self._made: StorageBackend | None = None
        self._objects = objects
        self._report = report
        self._room = room
        self._late = late
        self._failures = LoggedError(_log)
        self._calls = calls
        self._paces: dict[type[Transfer], Pace] = {
            FetchTransfer: Pace(),
            PersistTransfer: Pace(),
        }
        self._handed_in = self._accepted = 0
        """How often orders were handed in, and were accepted by the loop's thread."""
        self._running: dict[int, Transfer | asyncio.Task[None]] = {}
        """Transfers, and the tasks of lookups, by their operations."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._close_timeout_s = 0.0
        self._trouble: str | None = None
        self.failure: tuple[Exception, float] | None = None
        """The error that kept the backend from opening, and its time."""
        self._opened: SimpleQueue[Exception | None] = SimpleQueue()
        self._open_by = self._open_timeout_s = 0.0
        self._is_open = False
        self._failed: Callable[[str], None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._gives_up = False
        self._early: list[TimedOrder] | None = []
        """Orders submitted before the backend was open; None once it is open."""
        self._refusal: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-storage", daemon=True)

    def open(self, timeout_s: float) -> None:
        """Start the thread, and return once the backend is open; raises as `is_open` does."""
        self.start(timeout_s)
        self._hear(timeout_s)
        self.is_open()

    def start(self, timeout_s: float, failed: Callable[[str], None] | None = None) -> None:
        """Start the thread, which opens the backend, and return; it may take `timeout_s`.

        If it does not open, `failed` is told why, on that thread.
        """
        self._failed = failed
        self._open_timeout_s = timeout_s
        self._open_by = time.monotonic() + timeout_s
        self._thread.start()

    def is_open(self) -> bool:
        """Say whether the backend is open; does not wait. One thread asks.

        Raises what kept it from opening, and `ConfigError` once its time is up; a backend that opens
        later is closed again.
        """
        if not self._is_open and self._refusal is None:
            self._hear(0.0)
        if self._refusal is not None:
            raise self._refusal
        return self._is_open

    def _hear(self, timeout_s: float) -> None:
        """Wait, up to a time, for what became of opening the backend."""
        try:
            self._refusal = self._opened.get(timeout=timeout_s)
            self._is_open = self._refusal is None
        except Empty:
            if time.monotonic() >= self._open_by:
                self.stop(self._open_timeout_s)
                self._refusal = ConfigError(
                    f"the store did not open within {self._open_timeout_s:g} s; check that it can be"
                    " reached"
                )

    def submit(self, orders: Sequence[TimedOrder]) -> bool:
        """Hand in orders; False if the loop has ended, and does not carry them out.

        They wait until the backend is open, and are refused if it does not open.
        """
        if self._trouble is not None:
            return False
        try:
            self._loop.call_soon_threadsafe(self._take, orders)
        except RuntimeError:
            return False
        self._handed_in += 1
        return True

    def trouble(self) -> str | None:
        """Say why the loop has ended, or None."""
        return self._trouble

    def is_opening(self) -> bool:
        """Say whether the backend neither is open nor has failed to open."""
        return self._early is not None

    def is_idle(self) -> bool:
        """Say whether nothing runs, and nothing was handed in that is still to run."""
        if self._accepted != self._handed_in:
            return False
        return not (self._running or self._early)

    @property
    def _backend(self) -> StorageBackend:
        """The backend, which orders come for only once it is open."""
        assert self._made is not None
        return self._made

    def stop(self, timeout_s: float, *, opening: bool = False) -> None:
        """Cancel everything and close the backend, in about `timeout_s`; does not wait.

        `opening` is cancelled as well: only for a backend that then uses the memory no more.
        """
        self._close_timeout_s = timeout_s
        try:
            self._loop.call_soon_threadsafe(self._stop, opening)
        except RuntimeError:
            return

    def _stop(self, opening: bool) -> None:
        self._stopping.set()
        self._gives_up = opening
        if opening and self._opening is not None:
            self._opening.cancel()

    def join(self, timeout_s: float) -> bool:
        """After `stop`: wait for the thread to end; say whether it did. Then nothing is touched."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._live())
            except BaseException as error:  # noqa: BLE001 - whatever ended the loop, the rank must say so.
                # Before the runner ends the tasks that are left, which takes as long as their calls.
                self._died(error)

    async def _live(self) -> None:
        try:
            self._made = MetricsBackend(self._make_backend(), self._calls)
            self._opening = self._loop.create_task(self._made.open(self._objects.memory()))
            if self._gives_up:
                self._opening.cancel()
            await self._opening
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is raised in the thread that called `open`.
            failure = error if isinstance(error, Exception) else StorageError("it was let go of")
            self.failure = failure, time.monotonic()
            self._trouble = f"the store did not open: {failure}"
            self._opened.put(failure)
            if self._failed is not None and not self._gives_up:
                self._failed(str(failure))
            self._take_early()
            return
        self._opened.put(None)
        self._take_early()
        await self._stopping.wait()
        await self._shut_down()

    def _died(self, error: BaseException) -> None:
        self._trouble = f"the storage loop has ended: {error!r}"
        self._opened.put(ConfigError(self._trouble))
        for operation, running in list(self._running.items()):
            if isinstance(running, asyncio.Task):
                self._report(Answered(operation, 0))
                continue
            # Its pages are not quiet: threads of the backend may go on without the loop.
            for progress in running.concluded():
                self._report(progress)

    def _take_early(self) -> None:
        early, self._early = self._early or [], None
        self._accept(early)

    def _take(self, orders: Sequence[TimedOrder]) -> None:
        self._accept(orders)
        self._accepted += 1

    def _accept(self, orders: Sequence[TimedOrder]) -> None:
        for timed in orders:
            order = timed.order
            if self._early is not None and not isinstance(order, Cancel):
                self._early.append(timed)
                continue
            if self._stopping.is_set() or self._trouble is not None:
                for report in refusal(order):
                    self._report(report)
                continue
            match order:
                case LookUp():
                    lookup = self._loop.create_task(self._look_up(order, timed.deadline))
                    self._running[order.operation] = lookup
                    lookup.add_done_callback(partial(self._looked_up, order.operation))
                case Fetch():
                    self._begin(FetchTransfer(order, answer_by(timed.deadline), self._objects))
                case Put():
                    self._begin(PersistTransfer(order, answer_by(timed.deadline), self._objects))
                case Cancel():
                    self._cancel(order.operation)

    async def _look_up(self, order: LookUp, deadline: float) -> None:
        OPERATION.set(order.operation)
        lookup = StoreLookUp(order, self._backend, self._objects)
        began, sooner = time.monotonic(), answer_by(deadline)
        try:
            async with asyncio.timeout(deadline - began):
                await lookup.ask(began, sooner)
        except TimeoutError:
            return
        except Exception as error:  # noqa: BLE001 - what cannot be told is missing (rule R9).
            self._failures.warn("the store failed in a lookup: %r", error)
        finally:
            self._late.note(began, sooner)
        self._report(lookup.answer())

    def _looked_up(self, operation: int, task: asyncio.Task[None]) -> None:
        # The fetch that follows may have begun by now.
        if self._running.get(operation) is task:
            del self._running[operation]
        _is_told_of(task)

    def _begin(self, transfer: Transfer) -> None:
        self._running[transfer.operation] = transfer
        transfer.driver = self._loop.create_task(self._drive(transfer))
        transfer.driver.add_done_callback(partial(self._driven, transfer))

    async def _drive(self, transfer: Transfer) -> None:
        OPERATION.set(transfer.operation)
        pace = self._paces[type(transfer)]
        for batch in transfer.batches(lambda: min(pace.call_bytes, self._room.bytes_max)):
            share = await self._room.take(batch.nbytes)
            if not transfer.wants(batch) or time.monotonic() >= transfer.deadline:
                self._room.give_back(share)
                return
            call = self._loop.create_task(transfer.call(self._backend, batch))
            transfer.calls.add(call)
            # A callback and not a `finally`, because a task that is cancelled early never runs.
            began = time.monotonic()
            pace.begin(began)
            call.add_done_callback(partial(self._returned, transfer, batch, share, began))
            if transfer.goes_first(batch):
                await asyncio.wait([call])
            # The call begins before the next batch is put together.
            await asyncio.sleep(0)

    def _driven(self, transfer: Transfer, driver: asyncio.Task[None]) -> None:
        if not driver.cancelled() and (error := driver.exception()) is not None:
            self._failures.warn("operation %d cannot be carried out: %s", transfer.operation, error)
        self._conclude(transfer)

    def _returned(
        self,
        transfer: Transfer,
        batch: Batch,
        share: int,
        began: float,
        call: asyncio.Task[Sequence[int]],
    ) -> None:
        transfer.calls.discard(call)
        self._room.give_back(share)
        self._late.note(began, transfer.deadline)
        if self._trouble is not None:
            _is_told_of(call)
            return
        before = transfer.bytes_ok
        outcomes: Sequence[int] | None = None
        try:
            outcomes = outcomes_of(call, batch)
        except Exception as error:  # noqa: BLE001 - the backend must not raise; whatever it did, the batch failed.
            if not call.cancelled():
                self._failures.warn(
                    "the store failed in operation %d: %r", transfer.operation, error
                )
        for progress in transfer.returned(batch, outcomes):
            self._report(progress)
        self._paces[type(transfer)].end(transfer.bytes_ok - before, time.monotonic())
        self._conclude(transfer)

    def _conclude(self, transfer: Transfer) -> None:
        """Conclude a transfer whose last batch has begun and whose last call has returned.

        Reports nothing if the loop has died, since its death has been reported.
        """
        if self._trouble is not None or transfer.is_driven() or transfer.calls:
            return
        if self._running.pop(transfer.operation, None) is None:
            return
        for progress in transfer.concluded():
            self._report(progress)
        fetched = transfer.bytes_ok if isinstance(transfer, FetchTransfer) else 0
        self._report(StorageQuiet(transfer.operation, fetched, transfer.bytes_ok - fetched))

    def _cancel(self, operation: int) -> None:
        early = self._early or []
        for timed in [each for each in early if each.order.operation == operation]:
            early.remove(timed)
            for report in refusal(timed.order):
                self._report(report)
        for task in _tasks(self._running.get(operation)):
            task.cancel()

    async def _shut_down(self) -> None:
        """Cancel what runs, and close the backend once it is quiet or after half of the time."""
        tasks = [task for running in self._running.values() for task in _tasks(running)]
        for task in tasks:
            task.cancel()
        half_s = self._close_timeout_s / 2
        if tasks:
            await asyncio.wait(tasks, timeout=half_s)
        try:
            async with asyncio.timeout(half_s):
                await self._backend.close()
        except Exception:  # noqa: BLE001 - the rank ends all the same.
            _log.exception("the store did not close cleanly")
        # The thread outlives its close while a call touches pages, which is how `join` can tell.
        waiting = [task for task in tasks if not task.done()]
        if waiting:
            await asyncio.wait(waiting)


def _tasks(running: Transfer | asyncio.Task[None] | None) -> Sequence[asyncio.Task[Any]]:
    """Return the tasks that have to end before an operation is quiet."""
    if running is None:
        return ()
    return (running,) if isinstance(running, asyncio.Task) else running.tasks()


def _is_told_of(task: asyncio.Task[Any]) -> None:
    """Let nothing more be logged of what a task raised: it has ended the loop, which says so."""
    if not task.cancelled():
        task.exception()
