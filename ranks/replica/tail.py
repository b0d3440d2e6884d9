"""The tail of a request: what it has beyond its whole pages, and how that is named in storage.

Of each pool with a page for every page of tokens that is the one page that is not full yet, if there is
one, and of each pool of states the state after exactly its tokens. All of it has one key, which
continues the chain of page keys: so a tail is made of ordinary objects, which say what they are the end
of, and are verified as any other. Where the tokens end with a whole page the key is that page's own,
and the state is the one that a checkpoint there would be.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..orders import ObjectTransfer
from .pages import PageRun
from .tree.components.base import Component
from .tree.page_keys import tail_key
from .tree.tokens import TOKEN_BYTES


class Tail(NamedTuple):
    """The tail of a request that has some tokens, as objects."""

    tokens: int
    """How many tokens it is the end of."""
    key: bytes
    components: tuple[int, ...]
    """The components that have an object of it."""

    def transfers(
        self, components: Sequence[Component], pages: Sequence[PageRun], *, sealed: bool = False
    ) -> tuple[ObjectTransfer, ...]:
        """Return the objects with the pages that hold them, which are given by component.

        `sealed` ones were saved there, and go out only as they were saved.
        """
        return tuple(
            ObjectTransfer(components[index].pool, (self.key,), tuple(pages[index]), sealed)
            for index in self.components
        )


def tail_of(
    components: Sequence[Component], last_key: bytes, tokens: bytes, page_bytes: int
) -> Tail:
    """Return the tail of a request with `tokens`, whose last whole page has the key `last_key`."""
    whole = len(tokens) - len(tokens) % page_bytes
    rest = tokens[whole:]
    return Tail(
        tokens=len(tokens) // TOKEN_BYTES,
        key=tail_key(last_key, rest),
        components=tuple(each.index for each in components if (rest if each.per_page else tokens)),
    )
