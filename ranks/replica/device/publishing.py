"""Publishing: what a request has computed becomes the tree's, on a device whose pages the replica owns.

What is published is shared from then on, backed up under the write policy, and locked for the request.
"""

from collections.abc import Sequence

from ....errors import UsageError
from ...protocol.notices import Cause
from ..core.basis import Basis
from ..operations.backing_up import BackingUp
from ..operations.requests import Request, Requests
from ..tree.node import DEVICE, Node
from ..tree.prefixes import Prefixes
from .checkpoints import Checkpoints


class Publishing:
    """Gives pages that requests have computed to the tree."""

    def __init__(
        self,
        basis: Basis,
        prefixes: Prefixes,
        requests: Requests,
        checkpoints: Checkpoints,
        backing_up: BackingUp,
    ) -> None:
        self._page_tokens = basis.config.page_tokens
        self._clock = basis.clock
        self._prefixes = prefixes
        self._residence = prefixes.residence
        self._components = prefixes.components
        self._has_windows = any(each.per_page for each in prefixes.components[1:])
        self._requests = requests
        self._checkpoints = checkpoints
        self._backing_up = backing_up

    def insert(self, request: Request, tokens: bytes, *, final: bool) -> int:
        """Publish the whole pages of `tokens`; return how many tokens the tree now shares."""
        prefixes = self._prefixes
        page_bytes = prefixes.tree.page_bytes
        pages = prefixes.tree.whole_pages(tokens)
        self.require_room(request, pages * page_bytes)
        if pages < request.prefix:
            raise UsageError(
                f"request {request.id!r} inserts {pages} pages and shares {request.prefix} already"
            )
        root = prefixes.root(request.place)
        found = prefixes.tree.follow(root, tokens)
        if request.prefix and request.node not in found[0]:
            raise UsageError(
                f"request {request.id!r} inserts other tokens than those that it was admitted with"
            )
        self._requests.witness_tokens("insert", request.id, tokens, int(final))
        self._clock.tick()
        is_at_page = len(tokens) == pages * page_bytes
        tokens = tokens[: pages * page_bytes]
        nodes = prefixes.cut_to(*found)
        node = nodes[-1] if nodes else root
        for each in nodes:
            if each.end > request.prefix:
                self._publish(request, each)
        if node.end < pages:
            node = prefixes.add(node, tokens[node.end * page_bytes :])
            self._publish(request, node)
        self._extend_lock(request, node)
        prefixes.use(node, priority=request.priority)
        if node.parent is not None:
            self._note_ends(request, node, final=final)
            if is_at_page:
                self._checkpoints.publish(request, node)
            self._backing_up.was_computed(node)
        return pages * self._page_tokens

    def ends_of(self, nodes: Sequence[Node], tokens: bytes) -> frozenset[int]:
        """Return where matches may end of a request whose tokens are in the tree as far as `nodes`."""
        if not self._has_windows:
            return frozenset()
        branch, last = nodes[-1].end if nodes else 0, self._prefixes.tree.whole_pages(tokens)
        return frozenset(position for position in (branch, last) if position)

    def _note_ends(self, request: Request, node: Node, *, final: bool) -> None:
        """Remember where matches may end on the path that was inserted."""
        passed = [position for position in request.ends if position <= node.end]
        for position in sorted(passed):
            self._prefixes.note_end(node, position)
        request.ends -= frozenset(passed)
        if final and self._has_windows:
            node.is_match_end = True

    def require_room(self, request: Request, computed_bytes: int) -> None:
        """Raise `UsageError` if a request has no pages for so many bytes of tokens."""
        pages = -(-computed_bytes // self._prefixes.tree.page_bytes)
        room = request.prefix + len(request.own[0])
        if pages > room:
            raise UsageError(f"request {request.id!r} has filled {pages} pages and has {room}")

    def _publish(self, request: Request, node: Node) -> None:
        """Give the request's own pages for `node` to it, or back if it has pages already."""
        residence = self._residence
        count = node.end - request.prefix
        for component in self._components:
            if not component.per_page:
                continue
            index = component.index
            mine, request.own[index] = request.own[index][:count], request.own[index][count:]
            if node.values[DEVICE][index] is None:
                residence.attach(node, DEVICE, index, mine, Cause.COMPUTED)
            else:
                residence.pools[DEVICE][index].give_back(mine)
        request.prefix = node.end

    def _extend_lock(self, request: Request, node: Node) -> None:
        self._prefixes.cut_for(node)
        if request.locks:
            request.locks = self._residence.extend(request.locks, node)
        else:
            request.locks = self._residence.hold(DEVICE, node, requested=True)
        request.node, request.prefix = node, node.end
