"""The needs of a model's components for a match, in the form in which a match asks for them."""

from collections.abc import Sequence

from .base import Component


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
        self.within_nodes = all(each.per_page for each in components)
        """Whether a match may end inside a node; a recurrent state is at its end only."""
