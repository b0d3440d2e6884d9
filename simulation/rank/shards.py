"""Which objects have a rank's part of a page, by the TP size of the group that wrote them.

A page's content is one number on every rank. An object stands for what one rank of one size has of it,
in parts that ranks of all sizes have in common; so a rank of another size needs some parts of one
object, or parts of several.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...page_format.page_layout import PageLayout, ShardPlace
from ...page_format.shard_sources import sources_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Some parts of the object that goes by a shard's name."""

    shard: str
    parts: frozenset[int]


class Shards:
    """What one rank of a group has of each page, and where else it is to be found."""

    def __init__(self, layouts: Mapping[str, PageLayout], rank: int, ranks: int) -> None:
        self.rank = rank
        self._layouts = layouts
        self._ranks = ranks
        self._known: dict[tuple[str, int], tuple[Piece, ...]] = {}

    def own(self, pool: str) -> Piece:
        """Return the object that this rank writes, whole."""
        return self.written_by(pool, self._ranks)[0]

    def written_by(self, pool: str, ranks: int) -> tuple[Piece, ...]:
        """Return where this rank's part of a page is in the objects of a group of so many ranks."""
        pieces = self._known.get((pool, ranks))
        if pieces is None:
            pieces = self._known[pool, ranks] = tuple(self._find(self._layouts[pool], ranks))
        return pieces

    def _find(self, layout: PageLayout, ranks: int) -> list[Piece]:
        place = ShardPlace.of(self.rank, self._ranks)
        if ranks == self._ranks:
            shard = layout.shard(self.rank, ranks)
            return [Piece(shard.name, frozenset(shard.shape.held))]
        sources = sources_of(layout, place, ranks)
        return [Piece(each.name, frozenset(each.shape.held)) for each in sources]


def damaged_part(key: bytes, piece: Piece) -> int:
    """Return which part of an object is damaged, where one is: an arbitrary one of each."""
    return sorted(piece.parts)[key[0] % len(piece.parts)]
