"""Components: the kinds of state that a model keeps for a prefix, one class each.

A component is one kind of state that a model keeps for a prefix: the KV of its full-attention
layers, of its sliding-window layers, or a recurrent state. Each has a pool on each tier, and on each
node of the tree a value on each tier or a tombstone. The replica knows components by this interface
and by their index in the node's value lists; full attention is the first.

A match may end at a position if each component has all that it needs there: a value, on the device or
on the host, for every position from `needed_from` of the end up to it. That is the whole validator;
restorable sets, locks, backups and what a prefetch brings all follow from it.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from ....errors import InternalError
from ...protocol.orders import KV_POOL
from ...protocol.replica_config import ReplicaConfig
from ..core.pages import PageRun


class Component:
    """One kind of per-prefix state. Lengths and positions are in pages of tokens."""

    name: ClassVar[str]
    per_page: ClassVar[bool] = True
    """Whether a value has one page for each page of tokens, or one in all, for the node's end."""
    held_by_requests: ClassVar[bool] = True
    """Whether a request uses the tree's device pages while it computes."""

    def __init__(self, index: int, pool: str, span: int | None) -> None:
        self.index = index
        """Its place in a node's value lists."""
        self.pool = pool
        """The name of its pool on either tier."""
        self.span = span
        """How many positions before its end a match needs; None stands for all."""

    def needed_from(self, end: int) -> int:
        """Return the first position that a match ending at `end` needs."""
        return 0 if self.span is None else max(0, end - self.span)

    def pages_of(self, width: int) -> int:
        """Return how many pages of the pool a value of a node of `width` pages has."""
        return width if self.per_page else 1

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """Divide a node's value where its run is cut after `pages` pages.

        The pages stay with their tokens, and a state with the lower half, for whose end it stands.
        """
        return (run[:pages], run[pages:]) if self.per_page else (None, run)


class FullAttentionComponent(Component):
    """The component that every model has: attention reads every token from the start.

    Its pages leave a tier from the leaves up, and take with them what other components have there:
    nothing can be used without them.
    """

    name = "full_attention"

    def __init__(self) -> None:
        super().__init__(0, KV_POOL, None)


class SlidingWindowComponent(Component):
    """The component of layers that attend to the last tokens only.

    A match needs the whole window before its end, and nothing of what lies before that. So a value
    that has left is a gap, behind which the count begins anew, and pages that no request's window
    reaches may leave in any order, those nearest to the root first.
    """

    name = "sliding_window"


class RecurrentComponent(Component):
    """The component of layers with a recurrent state: one slot that stands for a whole prefix.

    It exists at checkpoints only, and a match needs the state exactly at its end. A request computes in
    a slot of its own: a checkpoint is copied to it when the request continues from there, and from it
    when the request is published, so what the tree has is never written again.
    """

    name = "recurrent"
    per_page = False
    held_by_requests = False

    def __init__(self, index: int, pool: str, checkpoint_pages: int) -> None:
        super().__init__(index, pool, 1)
        self.checkpoint_pages = checkpoint_pages
        """A checkpoint is kept at every multiple of this."""


class Needs:
    """The needs of a model's components for a match, worked out once.

    One number of bits says what a node has (`Node.there`); parents have full attention wherever a child
    has it, so its bit at the end of a path stands for the whole path.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self.components = len(components)
        self.every = sum(1 << each.index for each in components)
        """The bits, on the device, of a node at which a match may end."""
        self.host = 1 << self.components
        """The bit of full attention on the host."""
        self.windows = tuple(
            (1 << each.index, each.span)
            for each in components
            if each.per_page and each.span is not None
        )
        """The components that need a part of the path: their bit on the device, and how many pages."""
        self.is_plain = len(components) == 1
        """Whether a match may end wherever full attention is."""
        self.within_nodes = all(each.per_page for each in components)
        """Whether a match may end inside a node; a recurrent state is at its end only."""


_KINDS: dict[str, Callable[[int, str, int], Component]] = {
    SlidingWindowComponent.name: SlidingWindowComponent,
    RecurrentComponent.name: RecurrentComponent,
}
"""Makers by name; each is called with an index, a pool and `every_pages`."""


def components_of(config: ReplicaConfig) -> tuple[Component, ...]:
    """Return the components, full attention first."""
    made: list[Component] = [FullAttentionComponent()]
    for each in config.components:
        if each.kind not in _KINDS:
            raise InternalError(f"there is no component {each.kind!r}")
        made.append(_KINDS[each.kind](len(made), each.pool, each.every_pages))
    return tuple(made)
