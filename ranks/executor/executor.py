"""The executor of one rank: its pools, its copies and its storage loop behind one interface.

Copies and storage report to a queue, each from its own thread; the engine's thread takes the reports
out, and only it knows the operations in flight and their deadlines. So nothing here needs a lock,
and `close` may be called from a signal handler, whatever it interrupts.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Self

import torch

from ...coordinator.ballot import Progress
from ...coordinator.proposal import Proposal, Readiness
from ...errors import InternalError, UsageError
from ...storage_backends.wrappers.base import Call
from ..protocol.agreed_pools import AgreedPool
from ..protocol.config import RankCacheConfig
from ..protocol.orders import (
    KV_POOL,
    AttachStore,
    Cancel,
    CopyToDevice,
    CopyToHost,
    DetachStore,
    Direction,
    Fence,
    Fetch,
    Fork,
    LookUp,
    Order,
    Put,
    Serve,
)
from ..protocol.timed_events import Timeline
from .base import ExecutorCounts, PageServer
from .copies import CopyEngine, CpuCopies
from .cuda_copies import CudaCopies
from .engine_pages import EnginePages
from .flights import Flights, Report
from .pools import DevicePool, HostPool, TierPools, make_pools
from .population import Population
from .storage_loop import StorageOrder, StorageQuiet, TimedOrder, refusal
from .stores import Connect, StoreAccess, Stores

_log = logging.getLogger(__name__)

_GATHER_S = 0.02
"""How long a wait gathers fetches that have come further and are not done, as far as is known here:
they may have come as far as another rank can."""


class RankExecutor:
    """Carries out the orders of one rank's replica; see `Executor`.

    It owns the pools, the copy engine and the stores. Reports about an operation come in the
    order of what happened, and after an operation's last report it is forgotten. What goes wrong is
    reported as an outcome; `trouble` tells what this rank cannot recover from.
    """

    def __init__(
        self,
        pools: Mapping[str, TierPools],
        *,
        connect: Connect | None = None,
        connect_source: Connect | None = None,
        inflight_bytes: int = 256 << 20,
        close_timeout_s: float = 10.0,
        timeline: Timeline | None = None,
    ) -> None:
        """There is no store yet; `connect` is for those that are attached later.

        `connect_source` says how to read from another group by its URI.
        """
        self._pools = dict(pools)
        self._close_timeout_s = close_timeout_s
        self._inbox: SimpleQueue[Report] = SimpleQueue()
        self._lent = self._pools[KV_POOL].device.lent
        self._flights = Flights(lent=self._lent, timeline=timeline)
        self._server: PageServer | None = None
        self._closed = False
        self._population: Population | None = None
        self._copies: CopyEngine
        if self._pools[KV_POOL].device.device.type == "cuda":
            self._copies = CudaCopies(self._pools, self._inbox.put)
        else:
            self._copies = CpuCopies(self._pools, self._inbox.put)
        self._stores = Stores(
            {name: pair.host for name, pair in self._pools.items()},
            self._inbox.put,
            connect=connect,
            connect_source=connect_source,
            inflight_bytes=inflight_bytes,
            close_timeout_s=close_timeout_s,
            timeline=timeline,
        )

    @classmethod
    def create(
        cls,
        config: RankCacheConfig,
        agreed: Mapping[str, AgreedPool],
        device: torch.device | Mapping[str, EnginePages],
        *,
        connect: Connect,
        connect_source: Connect | None = None,
        timeline: Timeline | None = None,
    ) -> Self:
        """Make all pools, open the store that `config` names, if any, and start.

        `device` is where device pages are to be, or an engine's own, by pool. `connect` is asked for
        that store, and for those that are attached later. Whether the agreed pages fit the machine is
        the caller's to check (`check_host_memory`), before any rank of the host takes its share.
        Raises `ConfigError` if the store does not open.
        """
        access = None if config.store is None else connect(config.store)
        pools = make_pools(agreed, device)
        try:
            executor = cls(
                pools,
                connect=connect,
                connect_source=connect_source,
                inflight_bytes=config.bounds.inflight_bytes,
                close_timeout_s=config.timeouts.quiesce_s,
                timeline=timeline,
            )
        except BaseException:
            for pair in pools.values():
                pair.host.close()
            raise
        try:
            if access is not None:
                executor.open_store(access)
        except BaseException:
            executor.close()
            raise
        # Pinned memory is there from the start.
        lazy = [pair.host.bytes_tensor for pair in pools.values() if not pair.host.pinned]
        if config.populate_host and lazy:
            executor._population = Population(lazy, executor._stores.is_moving)
        return executor

    def open_store(self, access: StoreAccess) -> None:
        """Open a store, wait for it, and use it; raises what keeps it from opening."""
        self._stores.open(access)

    def serve_with(self, server: PageServer) -> None:
        """Let a server answer readers of other groups; it is the executor's from now on."""
        self._server = server

    @property
    def device_pools(self) -> Mapping[str, DevicePool]:
        """The device's pages by the name of their pool, unless an engine owns them."""
        pools = {name: pair.device for name, pair in self._pools.items()}
        owned = {name: pool for name, pool in pools.items() if isinstance(pool, DevicePool)}
        if len(owned) < len(pools):
            raise UsageError("the device pages are the engine's; there is no device pool")
        return owned

    @property
    def device_pool(self) -> DevicePool:
        """The device's pages of full attention, unless an engine owns them."""
        return self.device_pools[KV_POOL]

    @property
    def host_pools(self) -> Mapping[str, HostPool]:
        """The host's pages by the name of their pool."""
        return {name: pair.host for name, pair in self._pools.items()}

    @property
    def host_pool(self) -> HostPool:
        """The host's pages of full attention."""
        return self._pools[KV_POOL].host

    def carry_out(self, orders: Sequence[Order]) -> None:
        if self._closed:
            raise UsageError("the executor is closed; it carries out no more orders")
        now = time.monotonic()
        for_storage: list[TimedOrder] = []
        for order in orders:
            match order:
                case CopyToHost() | CopyToDevice() if self._lent:
                    self._flights.hold(order)
                case CopyToHost() | CopyToDevice():
                    self._flights.begin(order, now)
                    self._copy(order)
                case Fork():
                    self._copies.fork(order.pool, order.source, order.destination)
                case LookUp() | Fetch() if order.source:
                    self._flights.begin(order, now)
                    self._submit([TimedOrder(order, now + order.timeout_s)], order.source)
                case LookUp() | Fetch() | Put():
                    self._flights.begin(order, now)
                    for_storage.append(TimedOrder(order, now + order.timeout_s))
                case Serve():
                    self._flights.keep(order)
                    self._server_of_pages.serve(order.operation, order.transfers)
                case Fence():
                    self._fence(order, now + order.timeout_s)
                case Cancel():
                    self._cancel(order, now, for_storage)
                case AttachStore() | DetachStore():
                    # What was ordered before was meant for the store before.
                    self._submit(for_storage)
                    for_storage = []
                    if isinstance(order, AttachStore):
                        self._stores.attach(order.proposal)
                    else:
                        self._stores.detach()
        self._submit(for_storage)

    def begin_copies(self, direction: Direction) -> None:
        for order in self._flights.begin_held(direction, time.monotonic()):
            self._copy(order)

    def progress(self) -> list[Progress]:
        self._hear(time.monotonic())
        return self._flights.collect()

    def wait(self, timeout_s: float) -> None:
        if self._flights.has_held_copies:
            return
        until = time.monotonic() + timeout_s
        gathering = False
        while not self._flights.has_news():
            now = time.monotonic()
            self._hear(now)
            if self._flights.has_progress() and not gathering:
                # More is likely to come further, and each time that is told costs a round.
                until, gathering = min(until, now + _GATHER_S), True
            if self._flights.has_news() or now >= until:
                return
            deadline = self._flights.next_deadline()
            horizon = until if deadline is None else min(until, deadline)
            try:
                self._flights.note(self._inbox.get(timeout=max(0.0, horizon - now)))
            except Empty:
                continue

    def _hear(self, now: float) -> None:
        """Note what was reported, and only then whose time is up: the engine may have been away."""
        while not self._inbox.empty():
            self._flights.note(self._inbox.get_nowait())
        self._flights.pass_until(now)

    def trouble(self) -> str | None:
        served = None if self._server is None else self._server.trouble()
        return self._copies.trouble() or self._stores.trouble() or self._flights.stuck or served

    def stage(self, proposal: Proposal) -> None:
        self._stores.stage(proposal)

    def readiness(self, proposal: Proposal) -> Readiness | str:
        return self._stores.readiness(proposal)

    def unstage(self, proposal: Proposal) -> None:
        self._stores.unstage(proposal)

    def serving_address(self) -> str:
        return "" if self._server is None else self._server.address

    def counts(self) -> ExecutorCounts:
        """Return what was done and seen so far: of bytes, what `progress` has reported."""
        calls = self._stores.calls()
        return ExecutorCounts(
            bytes_moved=self._flights.moved,
            pages_corrupt=sum(
                each[Call.READ].outcomes.get("corrupt", 0) for each in calls.values()
            ),
            storage_late=self._stores.late_calls(),
            copies={way: took.histogram() for way, took in self._flights.copies.items()},
            calls=calls,
        )

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
        self._stores.stop()
        quiet = self._copies.join(self._close_timeout_s)
        if self._server is not None:
            quiet &= self._server.close(max(0.0, until - time.monotonic()))
        if self._population is not None:
            quiet &= self._population.join(max(0.0, until - time.monotonic()))
        quiet &= self._stores.join(max(0.0, until - time.monotonic()))
        if not quiet:
            _log.warning("closed with pages still in use after %g s", self._close_timeout_s)
            return
        for pair in self._pools.values():
            pair.host.close()

    def _copy(self, order: CopyToHost | CopyToDevice) -> None:
        job = self._copies.begin(order.direction, order.transfers, order.operation)
        self._flights.copies_with(job)

    def _cancel(self, order: Cancel, now: float, for_storage: list[TimedOrder]) -> None:
        self._flights.drop_held(order.operation)
        timed = TimedOrder(order, now + order.timeout_s)
        source = self._flights.source_of(order.operation)
        going_on = self._flights.cancel(order.operation, timed.deadline)
        if isinstance(going_on, CopyToHost | CopyToDevice):
            return
        if isinstance(going_on, Serve):
            self._server_of_pages.withdraw(order.operation, self._read_no_more)
        elif source:
            self._submit([timed], source)
        else:
            for_storage.append(timed)

    def _read_no_more(self, operation: int) -> None:
        """Note, from the server's thread, that no reader touches what an operation has served."""
        self._inbox.put(StorageQuiet(operation, 0, 0))

    @property
    def _server_of_pages(self) -> PageServer:
        if self._server is None:
            raise InternalError("pages are to be served, and nothing was opened to serve them")
        return self._server

    def _fence(self, order: Fence, deadline: float) -> None:
        named = order.operations
        operations = self._flights.copying() if named is None else named
        for number in operations:
            self._flights.drop_held(number)
        reading = [number for number in operations if number in self._flights]
        while any(number in self._flights for number in reading):
            try:
                self._flights.note(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                break
        for number in reading:
            if number in self._flights:
                # It may still read pages that are being overwritten, so what it copies is worth
                # nothing, also where it ends well after all.
                self._flights.fail(number)

    def _submit(self, orders: Sequence[TimedOrder], source: str = "") -> None:
        loop = self._stores.loop(source) if orders else None
        if not orders or (loop is not None and loop.submit(orders)):
            return
        for timed in orders:
            self._refuse(timed.order)

    def _refuse(self, order: StorageOrder) -> None:
        for report in refusal(order):
            self._flights.note(report)
