"""Backup: computed pages to host memory.

Under write-through every node that an insert has touched and that is not on the host is backed up,
parents first, and what has been backed up on every rank is persisted. Of full attention that is the
whole path; of the other components what a match at its end needs, and only if they have it all: a
window with a gap, or one without the state beside it, would restore nothing. Of a window that an engine
lends all is backed up that it still has, so that a match may end earlier, where prompts part.
"""

from collections.abc import Sequence

from ....coordinator.operation import Kind, Outcome
from ....errors import InternalError
from ...config import WritePolicy
from ...orders import CopyTransfer
from ..effects import Outbox
from ..notices import Cause, NotBegun
from ..pages import PageRun
from ..settings import ReplicaConfig
from ..tree.components.base import Component
from ..tree.holds import Receipt
from ..tree.matching import Missing, lacking
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from .agenda import Agenda
from .kinds import Backup, Retract, Segment
from .lent import Lent
from .persisting import Persisting, hold_above


class BackingUp:
    """Begins backups, and gives the tree what they have brought."""

    def __init__(
        self,
        config: ReplicaConfig,
        prefixes: Prefixes,
        agenda: Agenda,
        persisting: Persisting,
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._prefixes = prefixes
        self._components = prefixes.components
        self._agenda = agenda
        self._persisting = persisting
        self._outbox = outbox
        if config.write_policy is WritePolicy.WRITE_BACK:
            prefixes.room.saves = self._saves

    def was_computed(self, node: Node) -> None:
        """Back up the path to `node`, which a request has published, if the policy is to do so."""
        if self._config.write_policy is WritePolicy.WRITE_THROUGH:
            self.write_through(node)

    def was_hit(self, node: Node) -> None:
        """Back up what of the path to `node` is hit often enough by now, if the policy is to do so."""
        if self._config.write_policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        hits = self._config.selective_hits
        worth = next((each for each in node.path() if each.hits >= hits), None)
        if worth is not None:
            self.write_through(worth)

    def write_through(
        self, node: Node, lent: Lent | None = None, *, tells: bool = True
    ) -> int | None:
        """Back up what of the path to `node` is not on the host, from the top as far as there is room.

        From the top, since a backed-up child implies a backed-up parent. What is copied are the
        nodes' device pages, or those that are lent. Returns the operation, if one was needed. What
        there is no room for is told in a notice, unless it was told before (`tells`).
        """
        if not self._config.host_pages:
            return None
        residence = self._prefixes.residence
        # What is held is counted by nodes, so those that a match needs have to begin where it does.
        self._prefixes.cut_for(node)
        if lent is not None:
            for component in self._components[1:]:
                if component.per_page:
                    self._prefixes.cut(node, lent.whole_from(component))
        # What is on the host of the path must stay there while room is made beside it.
        pins = residence.hold(HOST, node)
        room = [residence.available(HOST, each.index) for each in self._components]
        missing, whole = self._full_attention(node, room[0])
        if whole:
            missing += self._others(node, room, lent, tells=tells)
            pins += hold_above(residence, node, missing)
        else:
            self._no_room(tells=tells)
        if missing and not whole:
            shorter = residence.hold(HOST, missing[-1][0])
            residence.release(pins)
            pins = shorter
        if not missing:
            residence.release(pins)
            return None
        return self._begin(pins, missing, lent)

    def source(self, missing: Missing, lent: Lent | None) -> PageRun | None:
        """Return the device pages from which host memory gets what it lacks, if they are there."""
        node, index = missing
        return (
            node.values[DEVICE][index] if lent is None else lent.of(node, self._components[index])
        )

    def transfers(self, segments: dict[Segment, PageRun], lent: Lent | None) -> list[CopyTransfer]:
        """Return what is to be copied for segments, whose own pages are on the host."""
        transfers: list[CopyTransfer] = []
        for segment, pages in segments.items():
            source = self.source(segment, lent)
            assert source is not None
            pool = self._components[segment.component].pool
            transfers.append(CopyTransfer(pool, tuple(source), tuple(pages)))
        return transfers

    def settle(self, operation: Backup | Retract) -> None:
        """Give the tree what has been copied on every rank, and storage after it."""
        settled: list[Segment] = []
        for segment in operation.in_order():
            node, component = segment
            if node.values[HOST][component] is None and _may_attach(node, component):
                pages = operation.give(segment)
                self._prefixes.residence.attach(node, HOST, component, pages, Cause.BACKED_UP)
                settled.append(segment)
        self._agenda.finish(operation, Outcome.COMPLETE)
        self._persisting.offer(settled)

    def failed(self, operation: Backup) -> None:
        """Apply a backup that failed on some rank."""
        self._agenda.stop(operation, Outcome.FAILED)

    def _saves(self, node: Node, component: int) -> bool:
        """Back up a node whose pages of a component are to leave; say if they have to stay for that.

        Once for each use of the node: where host memory is small, the copies of those that leave
        together drive each other out, and none of them would ever go.
        """
        lost = any(
            node.values[DEVICE][each.index] is not None and node.values[HOST][each.index] is None
            for each in self._components
        )
        if lost and not node.is_saved:
            node.saved_at = node.last_access
            self._prefixes.residence.changed[node] = None
            self.write_through(node)
        return node.held[DEVICE][component] > 0

    def _full_attention(self, node: Node, room: int) -> tuple[list[Missing], bool]:
        """Return what to back up of full attention, and whether it is all."""
        missing: list[Missing] = []
        for each, _ in lacking(self._components[:1], node, HOST):
            if each.is_to_have(HOST, 0):
                continue
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
        self, node: Node, room: list[int], lent: Lent | None, *, tells: bool
    ) -> list[Missing]:
        """Return what to back up of the other components, so that a match may end at `node`."""
        found: list[Missing] = []
        if lent is None and not self._prefixes.tree.is_whole(node):
            return found
        for component in self._components[1:]:
            index = component.index
            missing = [
                each
                for each in lacking((component,), node, HOST)
                if not each[0].is_to_have(HOST, index)
            ]
            pages = sum(component.pages_of(each.width) for each, _ in missing)
            if any(self.source(each, lent) is None for each in missing):
                return []
            if pages > room[index]:
                self._no_room(tells=tells)
                return []
            found += missing
            if lent is not None and component.per_page:
                found += self._above(node, component, room[index] - pages, lent)
        return found

    def _above(self, node: Node, component: Component, room: int, lent: Lent) -> list[Missing]:
        """Return what is lent above that which a match at `node` needs, as far as there is room."""
        found: list[Missing] = []
        for each in node.path():
            if each.end > component.needed_from(node.end):
                continue
            room -= component.pages_of(each.width)
            there = each.values[HOST][component.index] is not None
            if there or each.is_to_have(HOST, component.index) or room < 0:
                # What lies above it was looked at when it was backed up itself.
                break
            if lent.of(each, component) is None:
                break
            found.append((each, component.index))
        return found

    def _no_room(self, *, tells: bool) -> None:
        if tells:
            self._outbox.notices.append(NotBegun(Kind.BACKUP))

    def _begin(self, receipts: list[Receipt], missing: Sequence[Missing], lent: Lent | None) -> int:
        """Back up what is missing; `receipts` pin what the host has of its path."""
        residence, last = self._prefixes.residence, receipts[0].node
        # The sources must not be evicted: taking the pages below may evict, so the holds come first.
        if lent is None:
            # What lies deeper is on the host already, and need not be on the device.
            deepest = max((node for node, _ in missing), key=lambda node: node.end)
            receipts += residence.hold(DEVICE, deepest)
        counts = [0] * len(self._components)
        for node, index in missing:
            counts[index] += self._components[index].pages_of(node.width)
        taken = self._prefixes.room.take(HOST, counts)
        if taken is None:
            raise InternalError("a backup finds less room on the host than was counted for it")
        operation = Backup(
            components=self._components,
            receipts=receipts,
            segments=self.divide(missing, taken),
            lent=0 if lent is None else last.end,
            lender="" if lent is None else lent.request,
        )
        transfers = self.transfers(operation.segments, lent)
        self._agenda.copy(operation, transfers, last.id, counts)
        return operation.id

    def divide(self, missing: Sequence[Missing], taken: list[PageRun]) -> dict[Segment, PageRun]:
        """Divide pages among what is missing, from the first on; the rest stays in `taken`."""
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
