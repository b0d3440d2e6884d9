"""An executor in virtual time that moves content numbers instead of bytes and tracks memory accesses.

The executor obeys the contract of `ranks.executor.base.Executor` and uses all the freedom that the
contract gives: pages land out of order, transfers continue after a `Cancel`, reports are late or
repeated. Its reports are never wrong: `Landed` counts verified pages only, and `Quiesced` follows the
last access. Forks happen at once, like device work in stream order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from ...coordinator.ballot import Capped, Expired, Landed, Progress
from ...coordinator.proposal import Proposal, Readiness
from ...ranks.executor.base import BytesMoved, ExecutorCounts
from ...ranks.protocol.orders import (
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
    ObjectTransfer,
    Order,
    Put,
    Serve,
)
from ...ranks.replica.tree.node import DEVICE, HOST
from ..world.contents import GARBAGE, TORN
from ..world.faults import Mishap
from .conditions import Conditions, ObjectPage, OrderWork
from .copies import Copies
from .memory import SimulatedStore, Slots, SymbolicMemory
from .simulated_lookups import SimulatedLookups
from .simulated_page_server import SimulatedPageServer
from .simulated_stores import SimulatedStores
from .stores import OpenStore, PageSource


class SimulatedExecutor:
    """The executor of one simulated rank; see `ranks.executor.base.Executor`."""

    def __init__(
        self,
        conditions: Conditions,
        *,
        memory: SymbolicMemory,
        store: SimulatedStore,
        page_bytes: int,
        copies: type[Copies] = Copies,
    ) -> None:
        self.memory = memory
        self.sick: str | None = None
        """Why the rank is unhealthy, or None; set by the schedule or by a hung copy, and returned by
        `trouble`."""
        self.lends_device = False
        """Whether the device pages are owned by the engine."""
        self.lost_device = False
        """Whether a copy into engine-owned device pages has continued past its quiesce deadline."""
        self.conditions = conditions
        self.stores = SimulatedStores(store, conditions)
        self._faults = conditions.faults
        self._random = conditions.random
        self._page_bytes = page_bytes
        self.copies = copies(conditions, memory, page_bytes)
        self.serving = SimulatedPageServer(conditions, memory, store)
        self.address = ""
        """Address at which this rank serves pages to other groups; empty without a consumer group."""
        self.connect: Callable[[str], PageSource] = self._reach_nobody
        """Returns the group that serves pages at an address."""
        self._lookups = SimulatedLookups(conditions)
        self._works: dict[int, OrderWork] = {}
        self._corrupt = 0
        self._moved = {"l2_to_l3": 0, "l3_to_l2": 0}

    def carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case LookUp():
                    origin = self._origin(order.source)
                    work = self._begin(order.operation, "lookup", order.timeout_s, origin)
                    self._lookups.begin(order, work, origin)
                case Fetch():
                    self._fetch(order)
                case Put():
                    self._persist(order)
                case Serve():
                    self._serve(order)
                case CopyToHost() | CopyToDevice():
                    work = self._begin(order.operation, "copy", order.timeout_s)
                    if self.lends_device:
                        self.copies.hold(order, work)
                    else:
                        self.copies.begin(order, work)
                case Fork():
                    self._fork(order)
                case Fence():
                    self.copies.fence(order.operations or (), _us(order.timeout_s))
                case Cancel():
                    self._cancel(order)
                case AttachStore():
                    self.stores.attach(order.proposal)
                case DetachStore():
                    self.stores.detach()

    def begin_copies(self, direction: Direction) -> None:
        self.copies.begin_held(direction)

    def progress(self) -> list[Progress]:
        return self.conditions.take_reports()

    def wait(self, timeout_s: float) -> None:
        if not (self.conditions.has_reports or self.copies.has_held_copies):
            self.conditions.clock.advance_to_next(_us(timeout_s))

    def stage(self, proposal: Proposal) -> None:
        self.stores.stage(proposal)

    def readiness(self, proposal: Proposal) -> Readiness | str:
        return self.stores.readiness(proposal)

    def unstage(self, proposal: Proposal) -> None:
        self.stores.unstage(proposal)

    def trouble(self) -> str | None:
        return self.sick

    def serving_address(self) -> str:
        """Return the address at which this rank serves pages to other groups; empty if it has none."""
        return self.address

    def counts(self) -> ExecutorCounts:
        """Return the counts of moved bytes and corrupt pages."""
        moved = BytesMoved(**self._moved, **self.copies.moved)
        return ExecutorCounts(bytes_moved=moved, pages_corrupt=self._corrupt)

    def close(self) -> None:
        """Stop like a process that dies: no transfer accesses memory or the store any more."""
        self.conditions.closed = True

    def restless(self) -> set[int]:
        """Return the ids of cancelled operations whose transfers still access memory."""
        return {w.operation for w in self._works.values() if w.cancelled and w.touching}

    def _begin(
        self,
        operation: int,
        kind: Literal["lookup", "fetch", "persist", "copy"],
        timeout_s: float,
        origin: PageSource | None = None,
    ) -> OrderWork:
        before = self._works.get(operation)
        if before is not None and before.kind != "lookup":
            self._refuse(operation, f"is ordered to {kind} after {before.kind}")
        slowness = 1
        if origin is not None:
            slowness = self.conditions.slowness()
            origin.touch("a transfer")
        work = OrderWork(operation, kind, _us(timeout_s), slowness, origin)
        self._works[operation] = work
        return work

    @property
    def _store(self) -> OpenStore:
        return self.stores.used

    def _origin(self, source: str) -> PageSource:
        return self.connect(source) if source else self._store

    def _reach_nobody(self, source: str) -> PageSource:
        rank = self.conditions.rank
        self.conditions.find(f"rank {rank}: {source} is read, and nobody serves")
        return self._store

    def _cancel(self, order: Cancel) -> None:
        work = self._works.get(order.operation)
        if work is None:
            self._refuse(order.operation, "is cancelled but was never ordered")
            return
        self.copies.drop(order.operation)
        work.cancelled = True
        if work.kind == "serve":
            self.serving.withdraw(work, _us(order.timeout_s) // 2)
        for page in work.queue:
            if work.kind == "fetch":
                self._slots(page.pool).finish_writing(page.page, work.operation)
            else:
                self._slots(page.pool).finish_reading(page.page)
        work.queue.clear()
        while work.reading:
            self._end_read(work, work.reading[-1])
        self.conditions.maybe_quiet(work)
        if work.touching:
            self.conditions.plan(_us(order.timeout_s), partial(self._give_up, work))

    def _give_up(self, work: OrderWork) -> None:
        # Engine-owned pages cannot be quarantined by the replica. Report this rank as unhealthy
        # instead.
        if self.lends_device and self.copies.writes_device(work.operation):
            self.sick = f"the copy {work.operation} to the engine's device pages does not end"
            self.lost_device = True
        self.conditions.give_up_quiet(work)

    def _fork(self, order: Fork) -> None:
        slots = self.memory.named(DEVICE, order.pool)
        slots.fork(order.source, order.destination)

    def _refuse(self, operation: int, wrong: str) -> None:
        self.conditions.find(f"rank {self.conditions.rank}: operation {operation} {wrong}")

    def _slots(self, pool: str) -> Slots:
        return self.memory.named(HOST, pool)

    # A fetch or a persist is a queue of pages, of which a few are in flight at a time.

    def _fetch(self, order: Fetch) -> None:
        origin = self._origin(order.source)
        work = self._begin(order.operation, "fetch", order.timeout_s, origin)
        self._queue(work, order.transfers, origin if order.source else None)
        if not work.queue:
            work.over = True
            return
        work.pending = [True] * len(work.queue)
        for page in work.queue:
            self._slots(page.pool).claim_to_write(page.page, work.operation)
        self.conditions.plan(work.timeout_us, partial(self._expire_fetch, work))
        for _ in range(self._random.randint(1, 4)):
            self._next_read(work)

    def _persist(self, order: Put) -> None:
        work = self._begin(order.operation, "persist", order.timeout_s, self._store)
        self._queue(work, order.transfers)
        for page in work.queue:
            self._slots(page.pool).claim_to_read(page.page, work.operation)
        self.conditions.plan(work.timeout_us, partial(self.conditions.end, work, ok=False))
        for _ in range(self._random.randint(1, 3)):
            self._next_write(work)

    def _serve(self, order: Serve) -> None:
        work = self._works.get(order.operation)
        if work is None:
            work = self._works[order.operation] = OrderWork(order.operation, "serve", 0)
        self.serving.serve(order, work)

    def _queue(
        self,
        work: OrderWork,
        transfers: tuple[ObjectTransfer, ...],
        origin: PageSource | None = None,
    ) -> None:
        pages: list[ObjectPage] = []
        for transfer in transfers:
            if len(transfer.keys) != len(transfer.pages):
                counts = f"names {len(transfer.keys)} keys and {len(transfer.pages)} pages"
                self._refuse(work.operation, counts)
            pages += [
                ObjectPage(index, transfer.pool, key, page, origin)
                for index, (key, page) in enumerate(
                    zip(transfer.keys, transfer.pages, strict=False), start=len(pages)
                )
            ]
        if self._random.random() < 0.5:
            self._random.shuffle(pages)
        work.queue = deque(pages)

    def _next_read(self, work: OrderWork) -> None:
        if not work.queue:
            return
        page = work.queue.popleft()
        work.touching += 1
        self._slots(page.pool).content[page.page] = TORN
        (page.origin or self._store).begin(page.pool, page.key)
        if page.origin is not None:
            work.reading.append(page)
        ended = partial(self._read_ended, work, page)
        if self._faults.strikes(Mishap.HUNG_READ):
            self.conditions.plan_hung(work, ended)
            return
        self.conditions.plan(self.conditions.duration_us(work, 20_000), ended)

    def _end_read(self, work: OrderWork, page: ObjectPage) -> int | None:
        if page.origin is not None:
            work.reading.remove(page)
        slots = self._slots(page.pool)
        content = None if work.is_closed else self._read_object(page)
        slots.content[page.page] = GARBAGE if content is None else content
        slots.finish_writing(page.page, work.operation)
        work.touching -= 1
        return content

    def _read_ended(self, work: OrderWork, page: ObjectPage) -> None:
        if page.origin is not None and page not in work.reading:
            return
        content = self._end_read(work, page)
        if work.gave_up_quiet:
            self._faults.count(Mishap.LATE_WRITE)
        if content is not None:
            self._moved["l3_to_l2"] += self._page_bytes
            self._land(work, page.index)
        elif work.ceiling is None or page.index < work.ceiling:
            work.ceiling = page.index
            self.conditions.say(Capped(work.operation, page.index))
            if self._random.random() < 0.5:
                self._drop_beyond(work, page.index)
        self._next_read(work)
        self.conditions.maybe_quiet(work)

    def _read_object(self, page: ObjectPage) -> int | None:
        origin = page.origin or self._store
        content = origin.read(page.pool, page.key)
        if page.origin is not None:
            self._store.note_accepted(page.pool, page.key)
        if self._faults.strikes(Mishap.FAILED_READ) or content is None:
            return None
        for fault in (Mishap.MISSING_PAGE, Mishap.CORRUPT_PAGE):
            if self._faults.strikes(fault):
                origin.remove(page.pool, page.key)
                self._corrupt += fault is Mishap.CORRUPT_PAGE
                return None
        return content

    def _land(self, work: OrderWork, index: int) -> None:
        work.pending[index] = False
        before = work.landed
        while work.landed < len(work.pending) and not work.pending[work.landed]:
            work.landed += 1
        if work.landed > before:
            work.over = work.landed == len(work.pending)
            self.conditions.say(Landed(work.operation, work.landed))

    def _drop_beyond(self, work: OrderWork, ceiling: int) -> None:
        kept = [page for page in work.queue if page.index < ceiling]
        for page in work.queue:
            if page.index >= ceiling:
                self._slots(page.pool).finish_writing(page.page, work.operation)
        work.queue = deque(kept)

    def _expire_fetch(self, work: OrderWork) -> None:
        if not work.over and not work.cancelled:
            self.conditions.say(Expired(work.operation))

    def _next_write(self, work: OrderWork) -> None:
        if not work.queue:
            if not work.touching:
                self.conditions.end(work, ok=work.ok)
            return
        page = work.queue.popleft()
        work.touching += 1
        self._store.touch("a transfer")
        if self._faults.strikes(Mishap.HUNG_PERSIST):
            self.conditions.plan_hung(work, partial(self._write_ended, work, page))
            return
        delay_us = self.conditions.duration_us(work, 30_000)
        self.conditions.plan(delay_us, partial(self._write_ended, work, page))

    def _write_ended(self, work: OrderWork, page: ObjectPage) -> None:
        slots = self._slots(page.pool)
        content = slots.content[page.page]
        slots.finish_reading(page.page)
        work.touching -= 1
        if work.is_closed or self._faults.strikes(Mishap.FAILED_PERSIST):
            work.ok = False
        elif self._faults.strikes(Mishap.LOST_WRITE):
            self._store.note_accepted(page.pool, page.key)
        else:
            wrong = self._store.write(page.pool, page.key, content)
            self._moved["l2_to_l3"] += self._page_bytes
            if wrong is not None:
                self.conditions.find(wrong)
        self._next_write(work)
        self.conditions.maybe_quiet(work)


def _us(duration_s: float) -> int:
    return int(duration_s * 1_000_000)
