"""Load back: cached pages from host memory to the device.

Where the replica owns the device pages, they go to the tree once they are filled on every rank. Where
the engine has lent them, the operation only reads from the tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ....coordinator.operation import Outcome
from ...protocol.notices import Cause
from ...protocol.orders import CopyTransfer
from ..core.journal import Journal
from ..core.pages import PageRun, page_run
from ..tree.components import Component
from ..tree.matching import Missing
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from .agenda import Agenda
from .kinds import LoadBack, Loading, Resume, Segment
from .requests import Event, Request, Requests


class TailPages(NamedTuple):
    """The pages of a request that no node of the tree has, by component, on both tiers."""

    device: Sequence[PageRun]
    host: Sequence[PageRun]
    """Sealed when they were saved there; see `orders.CopyTransfer`."""


class LoadingBack:
    """Begins load backs, and applies to the tree what became of them."""

    def __init__(
        self, prefixes: Prefixes, agenda: Agenda, requests: Requests, journal: Journal
    ) -> None:
        self._prefixes = prefixes
        self._residence = prefixes.residence
        self._agenda = agenda
        self._requests = requests
        self._journal = journal

    def begin(
        self,
        request: Request,
        last: Node,
        missing: Sequence[Missing],
        pages: Sequence[PageRun],
        tail: TailPages | None = None,
        *,
        lent: bool = False,
    ) -> None:
        """Copy what is missing on the path to `last` from the host; the request waits for it.

        `pages` are device pages by component, as many as are missing: the operation's own from now
        on, or lent by the engine. With a `tail`, which the operation owns likewise, it resumes.
        """
        receipts = self._residence.hold(HOST, last)
        if not lent:
            receipts += self._residence.hold(DEVICE, last)
        segments: dict[Segment, PageRun] = {}
        transfers: list[CopyTransfer] = [] if tail is None else self._bring(tail)
        at = [0] * len(self._prefixes.components)
        for node, index in missing:
            component = self._prefixes.components[index]
            start, at[index] = at[index], at[index] + component.pages_of(node.width)
            destinations = pages[index][start : at[index]]
            # What the engine lends is no part of the replicated state: it stays in the order.
            segments[Segment(node, index)] = page_run() if lent else destinations
            transfers.append(self._transfer(node, component, destinations))
        kind = LoadBack if tail is None else Resume
        operation = kind(
            components=self._prefixes.components,
            receipts=receipts,
            segments=segments,
            request=request.id,
            lent=sum(at) if lent else 0,
        )
        if tail is not None:
            for index, (device, host) in enumerate(zip(tail.device, tail.host, strict=True)):
                operation.own(HOST, index, host)
                if not lent:
                    operation.own(DEVICE, index, device)
        self._requests.move(request, Event.LOAD)
        self._agenda.copy(operation, transfers, request.id, at)
        request.waits_for = operation.id

    def settle(self, operation: Loading) -> Request | None:
        """Give the tree what was filled on every rank; return the request that has waited for it."""
        for segment, pages in operation.segments.items():
            node, component = segment
            if pages and node.values[DEVICE][component] is None:
                mine = operation.give(segment)
                self._residence.attach(node, DEVICE, component, mine, Cause.LOADED)
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._requests.move(request, Event.LOADED)
            request.waits_for = None
        return request

    def note_failed(self, operation: Loading) -> None:
        """Note for the request that waits for a load what it does not bring."""
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            end = max((node.end for node, _ in operation.segments), default=0)
            request.sought = request.sought._replace(failed=end)

    def failed(self, operation: Loading) -> None:
        """Let no request find the source of a load back that failed; wait until no copy reads it."""
        residence = self._residence
        read = operation.in_order()
        self._agenda.release_receipts(operation)
        for node, component in reversed(read):
            self._disown_host(operation, node, component)
        # What others need stays in the tree, pinned until no copy reads it any more.
        kept = [n for n, component in read if n.parent and n.values[HOST][component] is not None]
        if kept:
            last = max(kept, key=lambda node: node.end)
            operation.receipts += residence.hold(HOST, last)
        self._agenda.stop(operation, Outcome.FAILED)

    def _transfer(self, node: Node, component: Component, destinations: PageRun) -> CopyTransfer:
        """Return the copy of what a node has on the host. Its page numbers are the order's own."""
        source = node.values[HOST][component.index]
        assert source is not None
        return CopyTransfer(component.pool, tuple(source), tuple(destinations))

    def _bring(self, tail: TailPages) -> list[CopyTransfer]:
        pages = zip(self._prefixes.components, tail.device, tail.host, strict=True)
        return [
            CopyTransfer(component.pool, tuple(host), tuple(device), sealed=True)
            for component, device, host in pages
            if device
        ]

    def _disown_host(self, operation: Loading, node: Node, component: int) -> None:
        # The host pages may still be read by a copy, so they pass to the operation and not back to
        # the pool. A node that others need on the host keeps them.
        residence = self._residence
        if node.parent is None or node.values[HOST][component] is None:
            return
        if node.held[HOST][component]:
            return
        leaving = residence.leaving(Cause.FAILED)
        if component:
            residence.detach(node, HOST, component, leaving)
        elif node.occupied_children[HOST] or node.is_held_on(HOST):
            return
        else:
            residence.detach_all(node, HOST, leaving)
        for index, pages in enumerate(leaving.runs[HOST]):
            operation.own(HOST, index, pages)
        residence.tell_of(leaving)
        self._journal.record("disown", operation.id, node.id, component)
        residence.remove_if_dead(node)
