"""A store that groups of several TP sizes share: objects by shard, which all of them find."""

from dataclasses import dataclass, field
from random import Random

from ..checkers.findings.pages import WrongObject
from ..contents import SHARDS
from .memory import SimulatedStore
from .shards import Piece, Shards, damaged_part
from .stores import RankStores

_Name = tuple[str, bytes, str]
"""Pool, key, and shard."""


@dataclass(slots=True)
class SharedObjects:
    """The objects that all groups have written."""

    sizes: frozenset[int]
    """The TP sizes of the groups that write."""
    objects: dict[_Name, int] = field(default_factory=dict[_Name, int])
    """Their contents, without regard to the rank."""
    damaged: dict[_Name, int] = field(default_factory=dict[_Name, int])
    """A part of an object that is not as it was written."""

    def lose_half(self, random: Random) -> int:
        """Lose about half of the objects; return how many."""
        lost = [name for name in self.objects if random.random() < 0.5]
        for name in lost:
            self.forget(name)
        return len(lost)

    def forget(self, name: _Name) -> None:
        """Lose one object, if it is there."""
        self.objects.pop(name, None)
        self.damaged.pop(name, None)


class SharedStore(SimulatedStore):
    """What one rank sees of it."""

    def __init__(
        self, meanings: dict[tuple[str, bytes], int], shards: Shards, shared: SharedObjects
    ) -> None:
        super().__init__(meanings, shards.rank)
        self.flips = False
        """Whether what this rank writes is damaged on its way."""
        self._shards = shards
        self._shared = shared

    def has(self, pool: str, key: bytes) -> bool:
        """See `SimulatedStore`."""
        return any(self._are_there(pool, key, pieces) for pieces in self._ways(pool))

    def read(self, pool: str, key: bytes) -> int | None:
        """See `SimulatedStore`. An object that is found to be damaged is lost."""
        for pieces in self._ways(pool):
            if not self._are_there(pool, key, pieces):
                continue
            names = [(pool, key, each.shard) for each in pieces]
            bad = [
                name
                for name, piece in zip(names, pieces, strict=True)
                if self._shared.damaged.get(name) in piece.parts
            ]
            for name in bad:
                self._shared.forget(name)
            if not bad:
                return self._shared.objects[names[0]] + self._shards.rank * SHARDS
        return None

    def write(self, pool: str, key: bytes, content: int) -> WrongObject | None:
        """See `SimulatedStore`."""
        wrong = self.compare(pool, key, content)
        own = self._shards.own(pool)
        name = pool, key, own.shard
        if name not in self._shared.objects:
            self._shared.objects[name] = content % SHARDS
            if self.flips:
                self._shared.damaged[name] = damaged_part(key, own)
        return wrong

    def remove(self, pool: str, key: bytes) -> None:
        """Lose the objects that a read would take."""
        for pieces in self._ways(pool):
            if self._are_there(pool, key, pieces):
                for each in pieces:
                    self._shared.forget((pool, key, each.shard))
                return

    def _ways(self, pool: str) -> list[tuple[Piece, ...]]:
        """Return in which objects to look, one after the other: this rank's own first."""
        own = self._shards.own(pool)
        others = [self._shards.written_by(pool, size) for size in sorted(self._shared.sizes)]
        return [(own,), *(each for each in others if each and each != (own,))]

    def _are_there(self, pool: str, key: bytes, pieces: tuple[Piece, ...]) -> bool:
        return all((pool, key, each.shard) in self._shared.objects for each in pieces)


class SharedStores(RankStores):
    """The stores of one rank, each of which all groups share."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store

    def named(self, uri: str) -> SimulatedStore:
        """Return the one store."""
        del uri
        return self.store
