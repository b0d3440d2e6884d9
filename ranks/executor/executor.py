"""The executor of one rank: its pools, its copies and its storage loop behind one interface.

Copies and storage report to a queue, each from its own thread; the engine's thread takes the reports
out, and only it knows the operations in flight and their deadlines. So nothing here needs a lock,
and `close` may be called from a signal handler, whatever it interrupts.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Self

import torch

from ...coordinator.ballot import (
    Answered,
    Ended,
    Expired,
    Landed,
    Progress,
    Quiesced,
    QuiesceExpired,
)
from ...errors import UsageError
from ...storage_backends.base import Counters, StorageBackend
from ..config import CacheConfig
from ..orders import (
    KV_POOL,
    Cancel,
    CopyToDevice,
    CopyToHost,
    Fence,
    Fetch,
    LookUp,
    Order,
    Persist,
)
from ..page_layout import ShardLayout
from .base import BytesMoved
from .copies import CopyEnded, CopyEngine, CpuCopies, Direction
from .cuda_copies import CudaCopies
from .deadlines import Deadlines
from .pools import DevicePages, DevicePool, HostPool, TierPools
from .population import Population
from .storage_loop import StorageLoop, StorageQuiet, StorageReport, TimedOrder, refusal

OPEN_TIMEOUT_S = 60.0
"""How long a store may take to open."""

_Report = StorageReport | CopyEnded


_Tracked = LookUp | Fetch | Persist | CopyToHost | CopyToDevice

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Flight:
    """An operation that was ordered and that this rank may still have something to say about."""

    order: _Tracked
    pages: int = 0
    """How many pages a fetch is to land."""
    ended: bool = False
    """Its end or its expiry was reported."""
    quiet: bool = False
    """Nothing touches its pages any more."""
    cancelled: bool = False


class RankExecutor:
    """Carries out the orders of one rank's replica; see `Executor`.

    It owns the pools, the copy engine and the storage loop. Reports about an operation come in the
    order of what happened, and after an operation's last report it is forgotten. What goes wrong is
    reported as an outcome; `trouble` tells what this rank cannot recover from.
    """

    def __init__(
        self,
        pools: Mapping[str, TierPools],
        *,
        backend: StorageBackend | None = None,
        store_namespace: str = "",
        inflight_bytes: int = 256 << 20,
        close_timeout_s: float = 10.0,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        self._pools = dict(pools)
        self._close_timeout_s = close_timeout_s
        self._inbox: SimpleQueue[_Report] = SimpleQueue()
        self._progress: list[Progress] = []
        self._flights: dict[int, _Flight] = {}
        self._deadlines = Deadlines()
        self._moved = BytesMoved()
        self._closed = False
        self._stuck: str | None = None
        self._population: Population | None = None
        self._storage: StorageLoop | None = None
        self._copies: CopyEngine
        if self._pools[KV_POOL].device.device.type == "cuda":
            self._copies = CudaCopies(self._pools, self._inbox.put)
        else:
            self._copies = CpuCopies(self._pools, self._inbox.put)
        if backend is None:
            return
        hosts = {name: pair.host for name, pair in self._pools.items()}
        self._storage = StorageLoop(
            backend, hosts, store_namespace, self._inbox.put, inflight_bytes=inflight_bytes
        )
        try:
            self._storage.open(open_timeout_s)
        except BaseException:
            self._copies.stop()
            self._copies.join(close_timeout_s)
            raise

    @classmethod
    def create(  # noqa: PLR0917 - each argument is another kind of thing.
        cls,
        config: CacheConfig,
        shard: ShardLayout,
        device: DevicePages,
        backend: StorageBackend | None,
        store_namespace: str,
        host_pages: int,
    ) -> Self:
        """Make the host's pages beside the device's, open the backend, and start.

        `backend` is not open yet and is the executor's from now on. `store_namespace` is the hex
        digest that all object names begin with. The page count is that which all ranks agreed on;
        whether it fits the machine is the caller's to check (`check_host_memory`), before any rank
        of the host takes its share. Raises `ConfigError` if the store does not open.
        """
        pinned = device.device.type == "cuda"
        # Pinning makes a context on the current device, which need not be this rank's.
        with torch.cuda.device(device.device) if pinned else nullcontext():
            pair = TierPools(device, HostPool(shard, host_pages, pinned=pinned))
        try:
            executor = cls(
                {KV_POOL: pair},
                backend=backend,
                store_namespace=store_namespace,
                inflight_bytes=config.bounds.inflight_bytes,
                close_timeout_s=config.timeouts.quiesce_s,
            )
        except Exception:
            pair.host.close()
            raise
        # Pinned memory is there from the start.
        if config.populate_host and not pinned:
            executor._population = Population(pair.host.bytes_tensor)
        return executor

    @property
    def device_pool(self) -> DevicePool:
        """The device's pages of the pool that every model has, unless an engine owns them."""
        pool = self._pools[KV_POOL].device
        if not isinstance(pool, DevicePool):
            raise UsageError("the device pages are the engine's; there is no device pool")
        return pool

    @property
    def host_pool(self) -> HostPool:
        """The host's pages of the pool that every model has."""
        return self._pools[KV_POOL].host

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Begin the orders and return without waiting for any of them."""
        if self._closed:
            raise UsageError("the executor is closed; it carries out no more orders")
        now = time.monotonic()
        for_storage: list[TimedOrder] = []
        for order in orders:
            match order:
                case CopyToHost():
                    self._track(order, now)
                    self._copies.begin(Direction.TO_HOST, order.transfers, order.operation)
                case CopyToDevice():
                    self._track(order, now)
                    self._copies.begin(Direction.TO_DEVICE, order.transfers, order.operation)
                case LookUp() | Fetch() | Persist():
                    self._track(order, now)
                    for_storage.append(TimedOrder(order, now + order.timeout_s))
                case Fence():
                    self._fence(order, now + order.timeout_s)
                case Cancel():
                    self._cancel(order, now, for_storage)
        self._submit(for_storage)

    def progress(self) -> list[Progress]:
        """Return what has happened since the last call, in the order in which it happened."""
        while True:
            try:
                self._note(self._inbox.get_nowait())
            except Empty:
                break
        self._deadlines.pass_until(time.monotonic(), self._passed)
        happened, self._progress = self._progress, []
        return happened

    def wait(self, timeout_s: float) -> None:
        """Return when there is progress to report, at the latest after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while not self._progress:
            now = time.monotonic()
            self._deadlines.pass_until(now, self._passed)
            if self._progress or now >= until:
                return
            deadline = self._deadlines.next()
            horizon = until if deadline is None else min(until, deadline)
            try:
                self._note(self._inbox.get(timeout=max(0.0, horizon - now)))
            except Empty:
                continue

    def trouble(self) -> str | None:
        """Say why this rank cannot go on, or None."""
        storage = None if self._storage is None else self._storage.trouble()
        return self._copies.trouble() or storage or self._stuck

    def bytes_moved(self) -> BytesMoved:
        """Return the bytes moved so far, as far as `progress` has reported them."""
        return self._moved

    def storage_counters(self) -> Counters:
        """Return what the store has seen: pages missing, corrupt and so on. Zeros without one."""
        return Counters() if self._storage is None else self._storage.counters()

    def pages_corrupt(self) -> int:
        """See `Executor`."""
        return self.storage_counters().reads_corrupt

    def close(self) -> None:
        """Stop everything and wait, bounded, until nothing touches the pools. Idempotent.

        What still touches a page then (a store that cannot be stopped) keeps the memory alive, and
        so can do no harm; it is left to a thread that does not keep the process from ending.
        """
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + self._close_timeout_s
        if self._population is not None:
            self._population.stop()
        self._copies.stop()
        if self._storage is not None:
            self._storage.stop(self._close_timeout_s)
        quiet = self._copies.join(self._close_timeout_s)
        if self._population is not None:
            quiet &= self._population.join(max(0.0, until - time.monotonic()))
        if self._storage is not None:
            quiet &= self._storage.join(max(0.0, until - time.monotonic()))
        if not quiet:
            _log.warning("closed with pages still in use after %g s", self._close_timeout_s)
            return
        for pair in self._pools.values():
            pair.host.close()

    def _track(self, order: _Tracked, now: float) -> None:
        pages = 0
        if isinstance(order, Fetch):
            pages = max((len(transfer.keys) for transfer in order.transfers), default=0)
        self._flights[order.operation] = _Flight(order, pages)
        self._deadlines.put(order.operation, now + order.timeout_s)

    def _forget(self, operation: int) -> None:
        self._flights.pop(operation, None)
        self._deadlines.drop(operation)

    def _cancel(self, order: Cancel, now: float, for_storage: list[TimedOrder]) -> None:
        flight = self._flights.get(order.operation)
        timed = TimedOrder(order, now + order.timeout_s)
        if flight is None or flight.quiet or isinstance(flight.order, LookUp):
            # A lookup may still run, but it touches no page.
            for_storage.append(timed)
            self._forget(order.operation)
            self._progress.append(Quiesced(order.operation))
            return
        flight.cancelled = True
        self._deadlines.put(order.operation, timed.deadline)
        if isinstance(flight.order, Fetch | Persist):
            for_storage.append(timed)
        else:
            self._copies.cancel(order.operation)

    def _fence(self, order: Fence, deadline: float) -> None:
        reading = [number for number in order.operations if number in self._flights]
        while any(number in self._flights for number in reading):
            try:
                self._note(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                break
        for number in reading:
            flight = self._flights.get(number)
            if flight is not None:
                # It may still read pages that are being overwritten, so what it copies is worth
                # nothing, also where it ends well after all.
                self._copies.cancel(number)
                self._note_ended(Ended(number, ok=False), flight)

    def _submit(self, orders: Sequence[TimedOrder]) -> None:
        if not orders or (self._storage is not None and self._storage.submit(orders)):
            return
        for timed in orders:
            for report in refusal(timed.order):
                self._note(report)

    def _note(self, report: _Report) -> None:
        """Take one report in, and keep what of it is progress."""
        flight = self._flights.get(report.operation)
        match report:
            case CopyEnded():
                self._note_copy(report, flight)
            case StorageQuiet():
                self._note_quiet(report, flight)
            case _ if flight is None:
                pass
            case Answered() if isinstance(flight.order, LookUp):
                self._progress.append(report)
                self._forget(report.operation)
            case Answered():
                pass
            case Ended():
                self._note_ended(report, flight)
            case Landed():
                self._progress.append(report)
                if report.pages >= flight.pages and not flight.cancelled:
                    self._deadlines.drop(report.operation)
            case _:
                self._progress.append(report)

    def _note_copy(self, report: CopyEnded, flight: _Flight | None) -> None:
        moved = self._moved
        if report.direction is Direction.TO_HOST:
            self._moved = replace(moved, l1_to_l2=moved.l1_to_l2 + report.nbytes)
        else:
            self._moved = replace(moved, l2_to_l1=moved.l2_to_l1 + report.nbytes)
        if report.reason and not (flight is not None and flight.cancelled):
            _log.error("operation %d: a copy failed: %s", report.operation, report.reason)
        if flight is not None:
            self._note_ended(Ended(report.operation, report.ok), flight)
            self._quieten(report.operation, flight)

    def _note_quiet(self, report: StorageQuiet, flight: _Flight | None) -> None:
        moved = self._moved
        self._moved = replace(
            moved,
            l3_to_l2=moved.l3_to_l2 + report.bytes_fetched,
            l2_to_l3=moved.l2_to_l3 + report.bytes_persisted,
        )
        if flight is not None:
            self._quieten(report.operation, flight)

    def _note_ended(self, report: Ended, flight: _Flight) -> None:
        if not flight.ended:
            flight.ended = True
            self._progress.append(report)

    def _quieten(self, operation: int, flight: _Flight) -> None:
        flight.quiet = True
        if flight.cancelled:
            self._progress.append(Quiesced(operation))
        # A fetch that stopped short is not over before its deadline or its cancel (see `Fetch`), but
        # all that can still be said of it is that its time is up.
        if flight.cancelled or flight.ended or not self._can_expire(operation, flight):
            self._forget(operation)

    def _can_expire(self, operation: int, flight: _Flight) -> bool:
        return isinstance(flight.order, Fetch) and self._deadlines.has(operation)

    def _passed(self, operation: int) -> None:
        """Say what a deadline that has passed means."""
        flight = self._flights[operation]
        if flight.cancelled:
            self._progress.append(QuiesceExpired(operation))
            if isinstance(flight.order, CopyToDevice) and self._pools[KV_POOL].device.lent:
                # The replica cannot keep pages that are not its own out of use.
                self._stuck = (
                    f"the copy {operation} to the engine's device pages does not end; the device is"
                    " taken for lost"
                )
            return
        if isinstance(flight.order, LookUp | Fetch):
            flight.ended = True
            self._progress.append(Expired(operation))
        else:
            self._note_ended(Ended(operation, ok=False), flight)
        if flight.quiet or isinstance(flight.order, LookUp):
            self._forget(operation)
