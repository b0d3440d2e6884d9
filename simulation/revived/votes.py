"""Revived bugs in the agreement between ranks; each reimplements the old, faulty behaviour."""

from collections import deque
from collections.abc import Iterator
from functools import partial

from msgspec import structs

from ...coordinator.ballot import Ballot, OperationProgress
from ...coordinator.operation import Phase, Queue
from ...coordinator.verdict import PrefetchFound, Verdict
from ...ranks.group.cache import Cache
from ...ranks.group.host_cache import HostCache
from ...ranks.group.member.rank_cache import RankCache
from ...ranks.protocol.effects import Effects
from ...ranks.protocol.orders import Fetch, Need, ObjectTransfer
from ...ranks.replica.operations.kinds import Moving, Operation, Prefetch
from ...ranks.replica.operations.operation_table import OperationTable
from ...ranks.replica.parts import Parts
from ...ranks.replica.prefetch.prefetching import Prefetching
from ...ranks.replica.tree.page_allocator import TIERS
from ..rank.conditions import ObjectPage
from ..rank.epoch import Build, make_executor
from ..rank.executor import SimulatedExecutor
from ..world.contents import EMPTY


def free_on_local_evidence() -> Build:
    """Return a build whose ranks free a cancelled operation's pages once their own I/O has quiesced."""
    return Build(cache=_FreesAloneOwned, host_cache=_FreesAloneLent)


class _FreesAlone(RankCache):
    def open_round(self) -> None:
        super().open_round()
        for operation in self._replica.operation_table.in_flight.values():
            if operation.phase is Phase.QUIESCE and self._ballot.progress_of(operation.id).quiesced:
                for tier in TIERS:
                    for index, pool in enumerate(self._replica.prefixes.allocator.pools[tier]):
                        pool.give_back(operation.owned_pages(tier, index))
                if isinstance(operation, Moving):
                    operation.owned.clear()
                elif isinstance(operation, Prefetch):
                    operation.assign(())


class _FreesAloneOwned(_FreesAlone, Cache): ...


class _FreesAloneLent(_FreesAlone, HostCache): ...


def count_without_names() -> Build:
    """Return a build whose ranks agree on the number of completed backups, not on which these are."""
    parts = Parts(operation_table=_ShowsItsLine, ballot=_Counts)
    return Build(parts=parts, cache=_SettlesOwnOwned, host_cache=_SettlesOwnLent)


class _Counts(Ballot):
    def watermark(self, queue: Queue) -> tuple[int, int | None]:
        if queue is not Queue.BACKUP:
            return super().watermark(queue)
        line = self._tickets[queue]
        ended = sum(self._has_ended(queue, operation) for _, operation in line.waiting)
        through = line.waiting[ended - 1][0] if ended else line.ended_through
        failed = [
            queue_index
            for queue_index, each in line.waiting
            if self.progress_of(each).failed_in(queue)
        ]
        return through, failed[0] if failed else None

    @property
    def backups(self) -> deque[tuple[int, int]]:
        return self._tickets[Queue.BACKUP].waiting


class _ShowsItsLine(OperationTable):
    @property
    def backups(self) -> deque[tuple[int, int]]:
        return self._queues[Queue.BACKUP]


class _SettlesOwn(RankCache):
    def _apply(self, verdict: Verdict) -> Effects:
        for watermark in verdict.watermarks:
            if watermark.queue is Queue.BACKUP:
                self._let_own_settle(watermark.ended_through)
        return super()._apply(verdict)

    def _let_own_settle(self, ended_through: int) -> None:
        """Reorder the queue so that the backups settled next are those that this rank has completed."""
        operation_table, ballot = self._replica.operation_table, self._ballot
        assert isinstance(operation_table, _ShowsItsLine)
        assert isinstance(ballot, _Counts)
        queue_indexes = [queue_index for queue_index, _ in operation_table.backups]
        line = [operation for _, operation in operation_table.backups]
        count = sum(queue_index <= ended_through for queue_index in queue_indexes)
        ended = [each for each in line if ballot.progress_of(each).ended][:count]
        others = [each for each in line if each not in ended]
        for waiting in (operation_table.backups, ballot.backups) if count else ():
            waiting.clear()
            waiting.extend(zip(queue_indexes, ended + others, strict=True))


class _SettlesOwnOwned(_SettlesOwn, Cache): ...


class _SettlesOwnLent(_SettlesOwn, HostCache): ...


def return_before_the_vote() -> Build:
    """Return a build in which a rank stops voting once its own part of all operations is done."""
    return Build(cache=_ReturnsEarlyOwned, host_cache=_ReturnsEarlyLent)


class _ReturnsEarly(RankCache):
    def open_round(self) -> None:
        in_flight = self._replica.operation_table.in_flight.values()
        if not in_flight or not all(
            _is_over(operation, self._ballot.progress_of(operation.id)) for operation in in_flight
        ):
            super().open_round()


def _is_over(operation: Operation, seen: OperationProgress) -> bool:
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


class _ReturnsEarlyOwned(_ReturnsEarly, Cache): ...


class _ReturnsEarlyLent(_ReturnsEarly, HostCache): ...


def smallest_of_the_longest() -> Build:
    """Return a build that restores the smallest of the ranks' longest lengths, even without a state.

    A rank that has no state at this length continues from its last earlier state, or from none.
    """
    make = partial(make_executor, kind=_FetchesWhatIsThere)
    return Build(make=make, parts=Parts(prefetching=_TakesTheSmallest))


class _UncommonFetch(Fetch, frozen=True):
    """A fetch of a prefix length at which some rank has no state."""

    needs: tuple[Need, ...] = ()
    """Keys that the lookup queried. A rank without a state at this length fetches the state of an
    earlier key."""


class _TakesTheSmallest(Prefetching):
    def found(self, verdict: PrefetchFound) -> None:
        operation = self.has_slot(verdict.operation)
        super().found(verdict._replace(longest=verdict.pages) if verdict.pages else verdict)
        order = self._outbox.orders[-1] if self._outbox.orders else None
        if (
            operation is not None
            and verdict.pages != verdict.longest
            and isinstance(order, Fetch)
            and order.operation == operation.id
        ):
            self._outbox.orders[-1] = _UncommonFetch(
                order.operation, order.transfers, order.timeout_s, order.source, operation.needs
            )


class _FetchesWhatIsThere(SimulatedExecutor):
    def _fetch(self, order: Fetch) -> None:
        if isinstance(order, _UncommonFetch):
            order = structs.replace(order, transfers=tuple(self._nearest(order)))
        super()._fetch(order)

    def _nearest(self, order: _UncommonFetch) -> Iterator[ObjectTransfer]:
        """Yield the fetch's transfers; replace a missing state by the last earlier one that exists."""
        need_of = {need.pool: need for need in order.needs}
        for transfer in order.transfers:
            keys, need = transfer.keys, need_of[transfer.pool]
            if need.span == 1:
                before = need.keys[: need.keys.index(keys[-1]) + 1]
                there = [key for key in before if self._store.has(transfer.pool, key)]
                keys = (*keys[:-1], there[-1] if there else b"")
            yield structs.replace(transfer, keys=keys)

    def _read_object(self, page: ObjectPage) -> int | None:
        return super()._read_object(page) if page.key else EMPTY
