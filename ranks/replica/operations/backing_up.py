"""Backup: copy computed pages to host memory.

Under write-through, an insert backs up the nodes of its path that the host lacks, parents first. Pages
backed up on every rank are then persisted.

Full attention is backed up for the whole path. Windows and states are backed up only where a match may
end: at the end of the insert, of the prompt and of earlier turns, and where prompts diverge. Such a
match end is skipped unless the device has all values that it needs, because an incomplete window, or a
window without its state, restores nothing. A window gets one extra page, so that a match may also end
one page earlier: if a prompt is sent again, its last token is always computed, so the match ends before
it. If the engine
lends the pages, all window pages that it still has are backed up.

A path for which the host has no room gets an entry in `PageAllocator.not_on_host` and is retried
(`Retrying`). If a path is longer than host memory, its excess pages are copied to temporary host pages,
persisted from there, and freed.
"""

from collections.abc import Iterable, Sequence

from ....coordinator.operation import OperationKind, Outcome
from ....errors import InternalError
from ...protocol.config import WritePolicy
from ...protocol.events import Cause, NotBegun
from ...protocol.orders import CopyTransfer
from ..core.pages import PageRun
from ..core.replica_parts import ReplicaParts
from ..tree.backlog import Awaited, Undone
from ..tree.components import Component
from ..tree.matching import Missing, lacking
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from ..tree.ref_counts import LockHandle
from .kinds import Backup, Retract, Segment
from .lent import Lent
from .operation_table import OperationTable
from .pauses import Pauses
from .persisting import Persisting, hold_pieces
from .requests import LentRequest, Requests

_ENDS_MAX = 4
"""Maximum number of earlier match ends (positions where a match may end) that one backup checks."""
_UNKEPT_SHARE = 4
"""Temporary host pages, which are persisted and then freed, take at most 1 / this value of a host pool.
"""


class BackingUp:
    """Starts backups, and attaches the copied pages to the tree."""

    def __init__(
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        requests: Requests,
        persisting: Persisting,
    ) -> None:
        self._config = config = basis.config
        self._prefixes = prefixes
        self._components = prefixes.components
        self._has_states = not all(each.per_page for each in prefixes.components)
        self._operation_table = operation_table
        self._requests = requests
        self._persisting = persisting
        self._outbox = basis.outbox
        self.pauses = Pauses(basis.clock)
        """Backoff between retries of failed copies to the host."""
        if config.write_policy is WritePolicy.WRITE_BACK:
            prefixes.allocator.saves = self._saves

    def was_computed(self, node: Node) -> None:
        """Back up the path to an inserted `node`, or persist it, as the write policy requires."""
        if self._config.write_policy is WritePolicy.WRITE_THROUGH:
            self.write_through(node)
        elif node.values[HOST][0] is not None:
            self._persisting.offer_path(node)

    def back_up_if_hit_often(self, node: Node) -> None:
        """Under write-through-selective, back up the nodes of the path to `node` that are hit often."""
        if self._config.write_policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        hits = self._config.selective_hits
        worth = next((each for each in node.path() if each.hits >= hits), None)
        if worth is not None:
            self.write_through(worth)

    def write_through(
        self, node: Node, lent: Lent | None = None, *, reports: bool = True, passes: bool = True
    ) -> tuple[int, ...]:
        """Back up the part of the path to `node` that is not on the host, from the top down.

        Parents come first because a backed-up child implies a backed-up parent. The backup stops where
        host memory has no room; if `reports`, an event is published. The pages are copied from `lent`
        if given, else from the nodes' device pages. If `passes`, a path longer than host memory may use
        temporary host pages. Pages that are already on the host are offered to the store. Returns the
        ids of the operations begun.
        """
        if not self._config.host_pages:
            return ()
        too_long = passes and self._is_too_long(node)
        ends = self._ends(node, lent, all_lacking=False)
        operations, left_out = self._back_up(node, ends, lent, too_long=too_long)
        if left_out and reports:
            self._outbox.events.append(NotBegun(OperationKind.BACKUP))
        self._postpone(left_out, lent)
        self._persisting.offer_path(node)
        return operations

    def write_through_again(self, node: Node, lent: Lent | None = None) -> tuple[int, ...]:
        """Retry the backup of the path to `node`, one match end after the other.

        The pages that a match end needs are copied all or not at all, because waiting paths would
        otherwise evict parts of each other forever. Once complete, these pages are persisted before
        they may be evicted. While the store accepts no writes, a retry that could evict unwritten pages
        is postponed. Returns the ids of the operations begun.
        """
        if not self._config.host_pages:
            return ()
        too_long = self._is_too_long(node)
        evicts_unwritten = too_long or (lent is None and len(self._components) > 1)
        if evicts_unwritten and self._persisting.pauses.blocks:
            self._postpone([node], lent)
            return ()
        # Retry earlier match ends only with a store: without one, match ends that do not fit in host
        # memory together would evict each other forever.
        several = lent is None and not too_long and self._persisting.keeps(node)
        ends = self._ends(node, lent, all_lacking=True) if several else [node]
        operations: tuple[int, ...] = ()
        pins: list[LockHandle] = []
        for end in ends:
            begun, left_out = self._back_up(end, [end], lent, too_long=too_long, whole=True)
            operations += begun
            self._postpone(left_out, lent)
            pins += self.pin(end)
        self._prefixes.allocator.release(pins)
        if several:
            # Queue again the earlier match ends that are still incomplete, because the copies of other
            # match ends may have taken the host pages of the earlier ones.
            not_on_host = self._prefixes.allocator.not_on_host
            above = self._ends(node, lent, all_lacking=True)[1:]
            self._postpone([each for each in above if each not in not_on_host], lent)
        # With `again`, pages that were once seen in the store are not written again. Otherwise a path
        # longer than host memory would be retried forever.
        self._persisting.offer_path(node, again=True)
        return operations

    def _back_up(
        self,
        node: Node,
        ends: Sequence[Node],
        lent: Lent | None,
        *,
        too_long: bool,
        whole: bool = False,
    ) -> tuple[tuple[int, ...], list[Node]]:
        """Back up the pages on the path to `node` that matches ending at the nodes `ends` need.

        With `too_long` (the path is longer than host memory), pages that do not fit are copied to
        temporary host pages. Otherwise, with `whole`, nothing is copied unless all that `node` needs
        fits. Returns (ids of the operations begun, nodes of `ends` for which the host has no room).
        """
        allocator = self._prefixes.allocator
        # Pin the part of the path that is on the host, so that the allocation does not evict it.
        pins = [pin for end in ends for pin in self.pin(end)]
        if lent is not None:
            for component in self._components[1:]:
                if component.per_page:
                    self._prefixes.cut(node, lent.whole_from(component))
            if too_long:
                self._persisting.remember_written(node)
        room = [allocator.available(HOST, each.index) for each in self._components]
        tops_up = not too_long or not self._to_pass_on(node, lent)
        missing, all_fits = self._full_attention(node, room[0], tops_up=tops_up)
        left_out = [node]
        if all_fits:
            others, left_out = self._others(ends, room, lent)
            missing += others
        if whole and node in left_out and not too_long:
            missing = []
        operations: tuple[int, ...] = ()
        if missing:
            operations = (self._begin(node, missing, lent),)
        allocator.release(pins)
        if not all_fits and too_long:
            passed, complete = self._pass_on(node, lent)
            operations += passed
            left_out = [] if complete else left_out
        return operations, left_out

    def pin(self, end: Node) -> list[LockHandle]:
        """Pin the host pages that a match needs if it ends at `end` or one page earlier.

        Splits the node in which the needed pages begin, because a node is pinned as a whole.
        """
        if end.parent is None:
            return []
        self._prefixes.cut_for(end)
        lock_handles: list[LockHandle] = []
        for each in self._components:
            start = self._first_kept(each, end) if each.per_page else end.start
            if each.index and each.per_page:
                self._prefixes.cut(end, start)
            lock_handles.append(
                self._prefixes.allocator.ref_counts.acquire(HOST, each.index, end, start)
            )
        return lock_handles

    def back_up_lent(self, node: Node, lent: Lent) -> tuple[int, ...]:
        """Back up the path to `node` from lent pages; return the ids of the operations begun.

        `Backlog.awaited` records the pages that could not be copied, until the engine lends them again.
        """
        again = lent.request in self._prefixes.allocator.not_on_host.awaited
        if again:
            # Count this call as a try: if copies have failed, `allow` starts the next backoff pause.
            self.pauses.allow()
            return self.write_through_again(node, lent)
        return self.write_through(node, lent)

    def engine_is_due(self, name: str) -> bool:
        """Return whether the engine should repeat a request's incomplete backup now. Changes nothing.

        A repetition may succeed once an operation has ended or the store accepts writes again.
        """
        awaited = self._prefixes.allocator.not_on_host.awaited.get(name)
        if awaited is None or self.pauses.blocks:
            return False
        store_goes_on = awaited.store_paused and not self._persisting.pauses.blocks
        return store_goes_on or awaited.ended != self._operation_table.ended

    def engine_gave_up(self, name: str) -> None:
        """Count a request's pages without a backup as lost, because the engine may reuse them."""
        self._prefixes.allocator.not_on_host.engine_is_done(name, gave_up=True)

    def source(self, missing: Missing, lent: Lent | None) -> PageRun | None:
        """Return the device pages from which to back up `missing` (node, component); None if absent."""
        node, index = missing
        return (
            node.values[DEVICE][index] if lent is None else lent.of(node, self._components[index])
        )

    def transfers(self, segments: dict[Segment, PageRun], lent: Lent | None) -> list[CopyTransfer]:
        """Return the transfers of segments (node, component) from the device to their host pages."""
        transfers: list[CopyTransfer] = []
        for segment, pages in segments.items():
            source = self.source(segment, lent)
            assert source is not None
            pool = self._components[segment.component].pool
            transfers.append(CopyTransfer(pool, tuple(source), tuple(pages)))
        return transfers

    def settle(self, operation: Backup | Retract) -> None:
        """Attach to the tree the pages copied on every rank, and offer them to storage."""
        self.pauses.succeeded()
        if isinstance(operation, Backup) and operation.passes:
            self._settle_unkept(operation)
            return
        settled: list[Segment] = []
        orphaned: list[Segment] = []
        for segment in operation.in_order():
            node, component = segment
            if node.values[HOST][component] is None and _may_attach(node, component):
                pages = operation.give(segment)
                self._prefixes.allocator.attach(node, HOST, component, pages, Cause.BACKED_UP)
                settled.append(segment)
            elif node.values[HOST][component] is None:
                orphaned.append(segment)
        # Queue orphaned segments (node, component) for a retry. A segment is orphaned if the copy of
        # its parent node has failed meanwhile.
        self._copy_again(operation, orphaned)
        self._operation_table.finish(operation, Outcome.COMPLETE)
        self._persisting.offer(settled)

    def failed(self, operation: Backup) -> None:
        self.pauses.failed()
        self._copy_again(operation, operation.in_order())
        self._operation_table.stop(operation, Outcome.FAILED)

    def _saves(self, node: Node, component: int) -> bool:
        """Back up a node before its device pages are evicted; return whether a lock keeps them.

        A node is backed up once per use. Otherwise, with a small host tier, nodes evicted together
        would evict each other's copies forever.
        """
        lost = any(
            node.values[DEVICE][each.index] is not None and node.values[HOST][each.index] is None
            for each in self._components
        )
        if lost and not node.is_saved:
            node.saved_at = node.last_access
            self._prefixes.allocator.changed[node] = None
            self.write_through(node)
        return node.held[DEVICE][component] > 0

    def _ends(self, node: Node, lent: Lent | None, *, all_lacking: bool) -> list[Node]:
        """Return `node` and the match ends above it that lack pages.

        A match end lacks pages if some that it needs are neither on the host nor in the store. Unless
        `all_lacking`, the search stops at the first match end that lacks none. With lent pages only
        `node` is returned, because its backup covers all pages above it that the engine still has.
        """
        ends = [node]
        if lent is not None or len(self._components) == 1:
            return ends
        for each in node.path():
            if each is node or not each.is_match_end:
                continue
            if self._lacks(each):
                ends.append(each)
            elif not all_lacking:
                break
            if len(ends) > _ENDS_MAX:
                break
        return ends

    def _lacks(self, end: Node) -> bool:
        """Return whether a match at `end` needs pages that are neither on the host nor in the store."""
        pieces = self._for_matches(end, None) or ()
        return any(self._persisting.lacks(each, index) for each, index in pieces)

    def _for_matches(self, end: Node, lent: Lent | None) -> list[Missing] | None:
        """Return the (node, component) pairs of windows and states to copy for a match at `end`.

        Includes one extra page of a window, if present. Returns None if the device lacks needed pages.
        """
        pieces: list[Missing] = []
        for component in self._components[1:]:
            index, needed_from = component.index, component.needed_from(end.end)
            first = self._first_kept(component, end)
            for each in end.path():
                if each.end <= first:
                    break
                if each.values[HOST][index] is not None or each.is_to_have(HOST, index):
                    continue
                if self.source((each, index), lent) is not None:
                    pieces.append((each, index))
                elif each.end > needed_from:
                    return None
        return pieces

    def _first_kept(self, component: Component, end: Node) -> int:
        """Return the first position needed by a match that ends at `end` or one page earlier.

        With recurrent states no extra page is counted, because matches end at checkpoints only.
        """
        room = self._config.pool_pages(HOST)[component.index]
        one_more = not self._has_states and (component.span or 0) < room
        return component.needed_from(end.end - 1 if one_more else end.end)

    def _can_ever_be_whole(self, node: Node) -> bool:
        """Return whether the path to `node` fits in host memory, or a store can take the excess."""
        return node.end <= self._config.host_pages or self._persisting.keeps(node)

    def _is_too_long(self, node: Node) -> bool:
        return node.end > self._config.host_pages and self._persisting.keeps(node)

    def _full_attention(
        self, node: Node, room: int, *, tops_up: bool
    ) -> tuple[list[Missing], bool]:
        """Return (missing, complete) for the full attention on the path to `node`.

        `missing` are the (node, component) pairs to back up. `complete` is True if the host then has
        the whole path. If the first page that the host lacks is in the store, or is being written
        there, `missing` is empty unless `tops_up` is set: such a path is persisted through temporary
        host pages.
        """
        missing: list[Missing] = []
        for each, _ in lacking(self._components[:1], node, HOST):
            if each.is_to_have(HOST, 0):
                continue
            if not (tops_up or missing or self._persisting.lacks(each, 0)):
                return missing, False
            if each.width <= room:
                missing.append((each, 0))
                room -= each.width
                continue
            if room:
                self._prefixes.split(each, room)
                assert each.parent is not None
                missing.append((each.parent, 0))
            return missing, False
        return missing, True

    def _others(
        self, ends: Sequence[Node], room: list[int], lent: Lent | None
    ) -> tuple[list[Missing], list[Node]]:
        """Return (windows and states to back up, nodes left out) for matches that end at `ends`.

        The windows and states are (node, component) pairs. A node of `ends` is left out if host memory
        has no room for everything that a match at the node needs.
        """
        found: dict[Missing, None] = {}
        left_out: list[Node] = []
        for end in ends:
            if lent is None and not self._prefixes.tree.is_whole(end):
                continue
            pieces = self._for_matches(end, lent)
            if pieces is None:
                continue
            wanted = [each for each in pieces if each not in found]
            left = room.copy()
            for node, index in wanted:
                left[index] -= self._components[index].pages_of(node.width)
            if min(left) < 0:
                if self._can_ever_fit(end):
                    left_out.append(end)
                continue
            room[:] = left
            found.update(dict.fromkeys(wanted))
        if lent is not None and not left_out:
            for component in self._components[1:]:
                if component.per_page:
                    found.update(dict.fromkeys(self._above(ends[0], component, room, lent)))
        return list(found), left_out

    def _can_ever_fit(self, end: Node) -> bool:
        """Return whether an empty host memory would have room for a match at `end`."""
        spans = (min(each.span or 0, end.end) for each in self._components[1:])
        return all(
            span <= pages
            for span, pages in zip(spans, self._config.pool_pages(HOST)[1:], strict=True)
        )

    def _above(self, end: Node, component: Component, room: list[int], lent: Lent) -> list[Missing]:
        """Return the lent window pages nearer the root than those that a match at `end` needs.

        They are (node, component) pairs, and are backed up as long as the host has room.
        """
        found: list[Missing] = []
        index = component.index
        for each in end.path():
            if each.end > component.needed_from(end.end):
                continue
            if each.values[HOST][index] is not None or each.is_to_have(HOST, index):
                # Stop at a node whose window is on the host, because the nodes above it were checked
                # when that node was backed up.
                break
            pages = component.pages_of(each.width)
            if pages > room[index] or lent.of(each, component) is None:
                break
            room[index] -= pages
            found.append((each, index))
        return found

    def _to_pass_on(self, node: Node, lent: Lent | None) -> list[Missing]:
        return [each for each in self._passing(node, lent) if self._persisting.lacks(*each)]

    def _passing(self, node: Node, lent: Lent | None) -> list[Missing]:
        """Return the (node, component) pairs to be persisted through temporary host pages.

        Their pages are on the device, and neither on the host nor in the store. Writes of some may be
        in flight.
        """
        wanted = [
            (each, 0)
            for each in node.path_down()
            if each.values[HOST][0] is None
            and not each.is_to_have(HOST, 0)
            and not self._persisting.has(each, 0)
            and self.source((each, 0), lent) is not None
        ]
        for end in self._ends(node, lent, all_lacking=True):
            wanted += [
                each
                for each in self._for_matches(end, lent) or ()
                if each not in wanted and not self._persisting.has(*each)
            ]
        return wanted

    def _pass_on(self, node: Node, lent: Lent | None) -> tuple[tuple[int, ...], bool]:
        """Copy pages of a path that is longer than host memory to temporary host pages.

        Copies only pages that the host lacks. Returns (ids of the operations begun, complete):
        `complete` is True if the path needs no further operation.
        """
        wanted = self._to_pass_on(node, lent)
        if not wanted:
            # A path of lent pages is complete only once its writes have succeeded, because the engine
            # could not lend the pages again if a write failed later.
            return (), lent is None or not self._passing(node, lent)
        if self._persisting.pauses.blocks or self._persisting.is_full:
            return (), False
        taken = self._allocate_unkept(wanted)
        if taken is None:
            return (), False
        # List the pages to copy again, because the allocation may have evicted or split nodes of the
        # path.
        wanted = self._to_pass_on(node, lent)
        chosen: list[Missing] = []
        room = [len(run) for run in taken]
        complete = True
        for each, index in wanted:
            pages = self._components[index].pages_of(each.width)
            if pages <= room[index]:
                room[index] -= pages
                chosen.append((each, index))
                continue
            complete = False
            # Do not split a node that is chosen for another component, because then only its lower part
            # would stay chosen for that component.
            divisible = self._components[index].per_page and all(each is not at for at, _ in chosen)
            if room[index] and divisible:
                self._prefixes.split(each, room[index])
                assert each.parent is not None
                chosen.append((each.parent, index))
                room[index] = 0
        if not chosen:
            for pool, run in zip(self._prefixes.allocator.pools[HOST], taken, strict=True):
                pool.give_back(run)
            return (), False
        # A path of lent pages is not complete yet, because the engine must keep the pages until they
        # are written.
        return (self._begin(node, chosen, lent, taken),), complete and lent is None

    def _allocate_unkept(self, wanted: Sequence[Missing]) -> list[PageRun] | None:
        """Allocate temporary host pages, by component, for at least a part of `wanted`.

        `wanted` are (node, component) pairs. Returns None if the first pair's component gets no page.
        """
        allocator = self._prefixes.allocator
        counts = [0] * len(self._components)
        for node, index in wanted:
            counts[index] += self._components[index].pages_of(node.width)
        for index, pages in enumerate(self._config.pool_pages(HOST)):
            most = min(allocator.available(HOST, index), max(1, pages // _UNKEPT_SHARE))
            counts[index] = min(counts[index], most)
        first = wanted[0][1]
        return self._prefixes.allocator.take(HOST, counts) if counts[first] else None

    def _settle_unkept(self, operation: Backup) -> None:
        pages = {segment: operation.give(segment) for segment in operation.in_order()}
        last = max((segment.node for segment in pages), key=lambda node: node.end)
        self._persisting.pass_on(pages, last)
        self._operation_table.finish(operation, Outcome.COMPLETE)

    def _postpone(self, ends: Sequence[Node], lent: Lent | None) -> None:
        """Queue match ends for which the host has no room, or record a lent backup as incomplete."""
        not_on_host = self._prefixes.allocator.not_on_host
        ends = [each for each in ends if self._can_ever_be_whole(each)]
        if lent is not None and not ends:
            not_on_host.engine_is_done(lent.request)
        for node in ends:
            missing = [
                (each, index)
                for each, index in lacking(self._components, node, HOST)
                if not each.is_to_have(HOST, index)
            ]
            if lent is not None:
                self._await(lent.request, Undone.NO_HOST_ROOM, self._pages_of(missing))
            else:
                not_on_host.add(node, Undone.NO_HOST_ROOM, self._pages_of(missing))

    def _copy_again(self, operation: Backup | Retract, lost: Sequence[Segment]) -> None:
        """Queue the pages of a failed copy for a retry, or record a lent backup as incomplete."""
        not_on_host = self._prefixes.allocator.not_on_host
        pages = self._pages_of(lost)
        if lost and not operation.lent:
            node = max((segment.node for segment in lost), key=lambda node: node.end)
            not_on_host.add(node, Undone.COPY_FAILED, pages)
            for end in self._ends_below(lost):
                not_on_host.add(end, Undone.COPY_FAILED, 0)
        elif lost and self._still_lends(operation):
            self._await(operation.lender, Undone.COPY_FAILED, pages)
        elif lost:
            not_on_host.lost[Undone.COPY_FAILED] += pages

    def _ends_below(self, lost: Sequence[Segment]) -> list[Node]:
        """Return the match ends, below nodes whose copy failed, that need window pages of these nodes.

        The backups of these match ends left out the window pages, because the copy was in flight then.
        """
        found: dict[Node, None] = {}
        for node, index in lost:
            component = self._components[index]
            below = list(node.children.values()) if index and component.per_page else []
            while below:
                each = below.pop()
                if self._first_kept(component, each) < node.end:
                    below += each.children.values()
                    if each.is_match_end:
                        found[each] = None
        return list(found)

    def _still_lends(self, operation: Backup | Retract) -> bool:
        """Return whether a request still lends a copy's source pages.

        After a fence or release, the request no longer lends pages to copies that began before.
        """
        request = self._requests.get(operation.lender)
        return isinstance(request, LentRequest) and operation.id in request.copies

    def _await(self, lender: str, cause: Undone, pages: int) -> None:
        paused = self._persisting.pauses.blocks or self._persisting.is_full
        awaited = Awaited(cause, pages, self._operation_table.ended, paused)
        self._prefixes.allocator.not_on_host.engine_waits_for(lender, awaited)

    def _pages_of(self, pieces: Iterable[tuple[Node, int]]) -> int:
        return sum(self._components[index].pages_of(node.width) for node, index in pieces)

    def _begin(
        self,
        node: Node,
        missing: Sequence[Missing],
        lent: Lent | None,
        passing: list[PageRun] | None = None,
    ) -> int:
        """Back up the (node, component) pairs in `missing`; return the id of the operation.

        The pairs are on the path to `node`. The path's host pages are pinned. `passing`, if given, are
        temporary host pages to copy to; those that are not needed are freed.
        """
        allocator = self._prefixes.allocator
        # Lock the source pages first, because the allocation of host pages may evict pages.
        lock_handles = [] if lent is not None else hold_pieces(allocator, DEVICE, missing)
        counts = [0] * len(self._components)
        for each, index in missing:
            counts[index] += self._components[index].pages_of(each.width)
        taken = self._prefixes.allocator.take(HOST, counts) if passing is None else passing
        if taken is None:
            raise InternalError("a backup finds less room on the host than was counted for it")
        lock_handles += hold_pieces(allocator, HOST, missing)
        operation = Backup(
            components=self._components,
            lock_handles=lock_handles,
            segments=self.divide(missing, taken),
            lent=0 if lent is None else node.end,
            lender="" if lent is None else lent.request,
            passes=passing is not None,
        )
        for pool, rest in zip(allocator.pools[HOST], taken, strict=True):
            pool.give_back(rest)
        transfers = self.transfers(operation.segments, lent)
        self._operation_table.copy(operation, transfers, node.id, counts)
        return operation.id

    def divide(self, missing: Sequence[Missing], taken: list[PageRun]) -> dict[Segment, PageRun]:
        """Assign pages from `taken` to the pairs in `missing`; unused pages stay in `taken`."""
        segments: dict[Segment, PageRun] = {}
        for node, index in missing:
            width = self._components[index].pages_of(node.width)
            segments[Segment(node, index)] = taken[index][:width]
            taken[index] = taken[index][width:]
        return segments


def _may_attach(node: Node, component: int) -> bool:
    if component:
        return node.values[HOST][0] is not None
    parent = node.parent
    assert parent is not None
    return parent.parent is None or parent.values[HOST][0] is not None
