"""Reading out of the host memory of another simulated group, as `peer://` does.

A read holds the pages of all ranks that it needs from its beginning to its end. What one of them does
not serve, or cuts off, is missing; what is damaged on its way is, too.
"""

from collections import defaultdict
from collections.abc import Mapping

from ..contents import SHARDS
from .serving import Reading, Serving
from .shards import Shards, damaged_part


class ServingGroup:
    """The page servers of all ranks of a group."""

    def __init__(self, servers: Mapping[str, Serving], shards: list[Shards]) -> None:
        """`servers` are by the name of a rank's shard, `shards` by rank."""
        self.servers = servers
        self.shards = shards
        self.is_gone = False
        """Whether nobody can connect any more, though the group goes on."""
        self.flips: str | None = None
        """The shard whose pages are damaged on their way."""


class Peers:
    """A group that serves pages, as one rank of another group reads them; see `Origin`."""

    closed = False

    def __init__(self, group: ServingGroup, shards: Shards) -> None:
        self._group = group
        self._shards = shards
        self._ranks = len(group.shards)
        self._reads = defaultdict[tuple[str, bytes], list[list[Reading | None]]](list)
        """By object: what each read of it holds."""

    def touch(self, who: str) -> None:
        """See `Origin`."""

    def has(self, pool: str, key: bytes) -> bool:
        """See `Origin`."""
        pieces = self._shards.written_by(pool, self._ranks)
        return not self._group.is_gone and all(
            self._group.servers[each.shard].has(pool, key) for each in pieces
        )

    def begin(self, pool: str, key: bytes) -> None:
        """See `Origin`."""
        readings: list[Reading | None] = []
        for piece in self._shards.written_by(pool, self._ranks):
            server = None if self._group.is_gone else self._group.servers[piece.shard]
            reading = None if server is None else server.begin(pool, key)
            if reading is not None and self._group.flips == piece.shard:
                own = reading.server.shards.own(pool)
                reading.is_damaged = damaged_part(key, own) in piece.parts
            readings.append(reading)
        self._reads[pool, key].append(readings)

    def read(self, pool: str, key: bytes) -> int | None:
        """See `Origin`."""
        contents = [None if each is None else each.end() for each in self._reads[pool, key].pop()]
        first = contents[0]
        if first is None or None in contents:
            return None
        return first % SHARDS + self._shards.rank * SHARDS

    def remove(self, pool: str, key: bytes) -> None:
        """Lose nothing: what is damaged on its way is whole where it lies."""
