"""Components: the kinds of state that a model keeps for a prefix, one class each.

Kinds are full-attention KV, sliding-window KV, and recurrent state. A component has a pool on each
tier. On each tier, a tree node has a value (its pages of the component) or a tombstone. The replica
knows a component by this interface and by its index in a node's lists; full attention has index 0.

A match may end at a position if every component has a value, on device or host, for every position from
`needed_from` up to that end. Restorable sets, locks, backups and prefetches follow from this rule.
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
    """Whether a node has one page of the component per page of tokens; otherwise it has one slot for
    the state at its end."""
    held_by_requests: ClassVar[bool] = True
    """Whether a request, while it computes, uses the component's device pages in the tree without
    copying them."""

    def __init__(self, index: int, pool: str, span: int | None) -> None:
        self.index = index
        """The component's index in the lists that nodes have by component."""
        self.pool = pool
        """The name of the component's pool on either tier."""
        self.span = span
        """How many pages a match needs, counted back from its end; None means all of them."""

    def needed_from(self, end: int) -> int:
        """Return the first position that a match ending at `end` needs."""
        return 0 if self.span is None else max(0, end - self.span)

    def pages_of(self, width: int) -> int:
        """Return how many pages of the component's pool a node of `width` pages of tokens uses."""
        return width if self.per_page else 1

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """Divide a node's pages of this component when the node is split after `pages` pages of tokens.

        Pages stay with their tokens; a state stays with the lower half, whose end it describes.
        """
        return (run[:pages], run[pages:]) if self.per_page else (None, run)


class FullAttentionComponent(Component):
    """Full attention, the component of every model: attention reads every token from the start.

    Its pages are evicted from the leaves up. A node's other components on that tier are evicted with
    them, because they need full attention.
    """

    name = "full_attention"

    def __init__(self) -> None:
        super().__init__(0, KV_POOL, None)


class SlidingWindowComponent(Component):
    """The component of layers that attend only to the last tokens.

    A match needs the whole window before its end and nothing earlier. After a position whose page was
    evicted, a match is possible only once a whole window follows. Pages without a lock or pin may be
    evicted from any node; nodes near the root are evicted first.
    """

    name = "sliding_window"


class RecurrentComponent(Component):
    """The component of layers with a recurrent state: one slot represents a whole prefix.

    States exist only at checkpoints, and a match needs the state exactly at its end. A request computes
    in a working slot. Checkpoint states are copied to and from the working slot, so the tree's slots
    are never overwritten.
    """

    name = "recurrent"
    per_page = False
    held_by_requests = False

    def __init__(self, index: int, pool: str, checkpoint_pages: int) -> None:
        super().__init__(index, pool, 1)
        self.checkpoint_pages = checkpoint_pages
        """A checkpoint is kept at every multiple of this many pages."""


class Needs:
    """The components that a match needs, as bitmaps of the same form as `Node.there`.

    `Node.there` has a bit for each component of which a node has pages. If a node has full attention,
    all its ancestors have it. Therefore the bit of full attention at the end of a path covers the whole
    path.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self.components = len(components)
        self.every = sum(1 << each.index for each in components)
        """The components that a node must have on the device so that a match may end there, as bits of
        `Node.there`."""
        self.host = 1 << self.components
        """The bit of `Node.there` for full attention on the host."""
        self.windows = tuple(
            (1 << each.index, each.span)
            for each in components
            if each.per_page and each.span is not None
        )
        """For each window component: (its device bit of `Node.there`, its span in pages). Such a
        component needs only part of the path."""
        self.is_plain = len(components) == 1
        """Whether full attention alone decides where a match may end."""
        self.within_nodes = all(each.per_page for each in components)
        """Whether a match may end inside a node; false with recurrent state, which exists only at node
        ends."""


_KINDS: dict[str, Callable[[int, str, int], Component]] = {
    SlidingWindowComponent.name: SlidingWindowComponent,
    RecurrentComponent.name: RecurrentComponent,
}
"""Constructors by component name; each is called with an index, a pool and `every_pages`."""


def components_of(config: ReplicaConfig) -> tuple[Component, ...]:
    """Return the configured components, full attention first."""
    made: list[Component] = [FullAttentionComponent()]
    for each in config.components:
        if each.kind not in _KINDS:
            raise InternalError(f"there is no component {each.kind!r}")
        made.append(_KINDS[each.kind](len(made), each.pool, each.every_pages))
    return tuple(made)
