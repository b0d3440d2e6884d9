"""Checkpoints: recurrent states kept beside a prefix, on a device whose pages the replica owns.

A request works on a slot of its own, and changes it in place. The tree keeps copies of it, which are
made where an insert ends at a checkpoint, and copied again for whoever goes on from there.
"""

from collections.abc import Sequence

from ...protocol.effects import Outbox
from ...protocol.notices import Cause
from ...protocol.orders import Fork
from ...protocol.replica_config import ReplicaConfig
from ..operations.requests import Request
from ..tree.components import RecurrentComponent
from ..tree.node import DEVICE, Node
from ..tree.prefixes import Prefixes


class Checkpoints:
    """Copies states between requests and the tree."""

    def __init__(self, config: ReplicaConfig, prefixes: Prefixes, outbox: Outbox) -> None:
        self._page_tokens = config.page_tokens
        self._tree = prefixes.tree
        self._residence, self._room = prefixes.residence, prefixes.room
        self._states = [
            each for each in prefixes.components if isinstance(each, RecurrentComponent)
        ]
        self._outbox = outbox

    def wanted(self, nodes: Sequence[Node], best: Node, tokens: bytes) -> frozenset[int]:
        """Return where a request keeps a state beside the regular positions."""
        if not self._states:
            return frozenset()
        branch, last = nodes[-1].end if nodes else 0, self._tree.whole_pages(tokens)
        return frozenset(position for position in (branch, last) if position > best.end)

    def stops(self, request: Request, best: int, tokens: bytes) -> tuple[int, ...]:
        """Return the tokens after which a state can be kept, from the page `best` up to the last."""
        if not self._states:
            return ()
        positions, last = set(request.checkpoints), self._tree.whole_pages(tokens)
        for component in self._states:
            every = component.checkpoint_pages
            positions |= set(range(best - best % every + every, last + 1, every))
        return tuple(position * self._page_tokens for position in sorted(positions))

    def publish(self, request: Request, node: Node) -> None:
        """Copy the state that the request works on to the tree, where a checkpoint is kept.

        If no slot is to be had there is no checkpoint: it costs a later hit and nothing else.
        """
        for component in self._states:
            index = component.index
            regular = not node.end % component.checkpoint_pages
            if node.values[DEVICE][index] is not None or not (
                regular or node.end in request.checkpoints
            ):
                continue
            slot = self._room.take_one(DEVICE, index, 1)
            if slot is not None:
                self._residence.attach(node, DEVICE, index, slot, Cause.COMPUTED)
                self._outbox.orders.append(Fork(component.pool, request.own[index][0], slot[0]))

    def fork(self, request: Request) -> None:
        """Copy the state at the end of the cached prefix to the slot that the request works on."""
        node = request.node
        if node is None or node.parent is None:
            return
        for component in self._states:
            source = node.values[DEVICE][component.index]
            assert source is not None
            working = request.own[component.index][0]
            self._outbox.orders.append(Fork(component.pool, source[0], working))
