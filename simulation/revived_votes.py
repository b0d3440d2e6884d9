"""Bugs in how ranks agreed, or thought that they had, each as what the old code did; see `revived`."""

# The old code lay inside of what is private here.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from ..coordinator.ballot import Ballot, Sightings
from ..coordinator.operation import Phase, Queue
from ..coordinator.verdict import Found, Watermark
from ..ranks.orders import Fetch, Need, ObjectTransfer
from ..ranks.rank_cache import RankCache
from ..ranks.replica.operations import Copy, Operation, Prefetch
from ..ranks.replica.prefetching import Prefetching
from ..ranks.replica.replica import Replica
from ..ranks.replica.residence import TIERS
from .conditions import Page
from .executor import SimulatedExecutor
from .memory import EMPTY
from .replacing import replaced


@contextmanager
def free_on_local_evidence() -> Generator[None]:
    """A rank frees the pages of an operation that was stopped once its own I/O is quiet."""
    open_round = RankCache.open_round

    def open_round_and_free(self: RankCache) -> None:
        open_round(self)
        state = self.replica.state
        for operation in state.operations.in_flight.values():
            if operation.phase is not Phase.QUIESCE:
                continue
            if self.ballot.sightings(operation.id).quiesced:
                for tier in TIERS:
                    for component in state.components:
                        pages = operation.owned_pages(tier, component.index)
                        state.pools[tier][component.index].give_back(pages)
                if isinstance(operation, Copy):
                    operation.owned.clear()
                elif isinstance(operation, Prefetch):
                    operation.wanted = ()

    with replaced(RankCache, "open_round", open_round_and_free):
        yield


@contextmanager
def count_without_names() -> Generator[None]:
    """The watermark of backups says how many have ended, and each rank settles its own of those."""
    watermark, apply_watermark = Ballot.watermark, Replica._apply_watermark

    def count(self: Ballot, queue: Queue) -> tuple[int, int | None]:
        if queue is not Queue.BACKUP:
            return watermark(self, queue)
        line = self._lines[queue]
        ended = sum(self._has_ended(queue, operation) for _, operation in line.waiting)
        through = line.waiting[ended - 1][0] if ended else line.ended_through
        failed = [ticket for ticket, each in line.waiting if self.sightings(each).failed_in(queue)]
        return through, failed[0] if failed else None

    def apply_own(self: Replica, watermark: Watermark) -> None:
        if watermark.queue is Queue.BACKUP:
            _settle_own(self, watermark)
        apply_watermark(self, watermark)

    with ExitStack() as stack:
        stack.enter_context(replaced(Ballot, "watermark", count))
        stack.enter_context(replaced(Replica, "_apply_watermark", apply_own))
        yield


def _settle_own(replica: Replica, watermark: Watermark) -> None:
    """Let the tickets that are to settle now be those of copies that have ended on this rank."""
    line = replica.state.operations.queues[Queue.BACKUP]
    ballot = replica.state.ballot
    assert isinstance(ballot, Ballot)
    count = sum(ticket <= watermark.ended_through for ticket, _ in line)
    if not count:
        return
    ended = [each for _, each in line if ballot.sightings(each).ended][:count]
    others = [each for _, each in line if each not in ended]
    tickets = [ticket for ticket, _ in line]
    line.clear()
    line.extend(zip(tickets, ended + others, strict=True))
    waiting = ballot._lines[Queue.BACKUP].waiting
    waiting.clear()
    waiting.extend(line)


@contextmanager
def return_before_the_vote() -> Generator[None]:
    """A rank that has voted that its own part of everything in flight is over votes no more."""
    open_round = RankCache.open_round

    def open_round_unless_done(self: RankCache) -> None:
        in_flight = self.replica.state.operations.in_flight.values()
        if in_flight and all(
            _is_over(operation, self.ballot.sightings(operation.id)) for operation in in_flight
        ):
            return
        open_round(self)

    with replaced(RankCache, "open_round", open_round_unless_done):
        yield


def _is_over(operation: Operation, seen: Sightings) -> bool:
    match operation.phase:
        case Phase.QUERY:
            return seen.answered is not None
        case Phase.TRANSFER:
            return isinstance(operation, Prefetch) and seen.landed == operation.wanted_count
        case Phase.ISSUED:
            return seen.ended is not None
        case Phase.QUIESCE:
            return seen.quiesced
        case _:
            return False


@contextmanager
def smallest_of_the_longest() -> Generator[None]:
    """The ranks take the MIN of their longest lengths, and each restores it with what it has.

    A rank without a state at that length goes on from the last one before it, or from none.
    """
    found = Prefetching.found
    fetch, read = SimulatedExecutor._fetch, SimulatedExecutor._read_object
    needs_of: dict[int, tuple[Need, ...]] = {}
    """Of the operations that restore a length which was not every rank's own."""

    def found_smallest(self: Prefetching, verdict: Found) -> None:
        operation = self.active.get(verdict.operation)
        found(self, verdict._replace(longest=verdict.pages) if verdict.pages else verdict)
        needs_of.pop(verdict.operation, None)
        if verdict.pages != verdict.longest and operation is not None:
            needs_of[operation.id] = operation.needs

    def fetch_with_what_is_there(self: SimulatedExecutor, order: Fetch) -> None:
        needs = needs_of.get(order.operation)
        if needs is not None:
            order = order._replace(transfers=tuple(_nearest(self, order, needs)))
        fetch(self, order)

    def read_perhaps_nothing(self: SimulatedExecutor, page: Page) -> int | None:
        return read(self, page) if page.key else EMPTY

    with ExitStack() as stack:
        stack.enter_context(replaced(Prefetching, "found", found_smallest))
        stack.enter_context(replaced(SimulatedExecutor, "_fetch", fetch_with_what_is_there))
        stack.enter_context(replaced(SimulatedExecutor, "_read_object", read_perhaps_nothing))
        yield


def _nearest(
    executor: SimulatedExecutor, order: Fetch, needs: tuple[Need, ...]
) -> Generator[ObjectTransfer]:
    """Yield the transfers; in the place of a state that the store lacks, the last one before it."""
    need_of = {need.pool: need for need in needs}
    for transfer in order.transfers:
        keys, need = transfer.keys, need_of[transfer.pool]
        if need.span == 1:
            before = need.keys[: need.keys.index(keys[-1]) + 1]
            there = [key for key in before if executor._store.has(transfer.pool, key)]
            keys = (*keys[:-1], there[-1] if there else b"")
        yield transfer._replace(keys=keys)
