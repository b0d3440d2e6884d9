"""Reading out of the host memory of another simulated group, as `peer://` does.

A read holds the pages of all ranks that it needs from its beginning to its end. What one of them does
not serve, or cuts off, is missing.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

from ...page_format.page_layout import PageLayout, ShardPlace
from ...page_format.shard_sources import sources_of
from ..world.contents import SHARDS
from .serving import Reading, Serving

PAGES_READ = "pages read from the other group"
PAGES_GONE = "pages that the other group no longer served"


class ServingGroup:
    """The page servers of all ranks of a group."""

    def __init__(self, layouts: Mapping[str, PageLayout], servers: Sequence[Serving]) -> None:
        """`layouts` are by pool, `servers` by rank."""
        self.ranks = len(servers)
        self.layouts = layouts
        self._servers = {
            (pool, layout.shard_name(ShardPlace.of(rank, self.ranks))): server
            for pool, layout in layouts.items()
            for rank, server in enumerate(servers)
        }

    def servers_for(self, pool: str, place: ShardPlace) -> list[Serving]:
        """Return the servers that together have the part of a page that belongs to `place`."""
        names = _objects_for(self.layouts[pool], place, self.ranks)
        return [self._servers[pool, name] for name in names]


@cache
def _objects_for(layout: PageLayout, place: ShardPlace, ranks: int) -> tuple[str, ...]:
    """Return the shards that a group of so many ranks names the objects by that a rank reads."""
    others = tuple(each.name for each in sources_of(layout, place, ranks))
    return others or (layout.shard_name(place),)


class Peers:
    """A group that serves pages, as one rank of another group reads them; see `Origin`."""

    closed = False

    def __init__(self, group: ServingGroup, place: ShardPlace, coverage: Counter[str]) -> None:
        self._group = group
        self._place = place
        self._coverage = coverage
        self._reads = defaultdict[tuple[str, bytes], list[list[Reading | None]]](list)
        """By object: what each read of it holds."""

    def touch(self, who: str) -> None:
        """See `Origin`."""

    def has(self, pool: str, key: bytes) -> bool:
        servers = self._group.servers_for(pool, self._place)
        return all(each.has(pool, key) for each in servers)

    def begin(self, pool: str, key: bytes) -> None:
        servers = self._group.servers_for(pool, self._place)
        self._reads[pool, key].append([each.begin(pool, key) for each in servers])

    def read(self, pool: str, key: bytes) -> int | None:
        contents = [None if each is None else each.end() for each in self._reads[pool, key].pop()]
        first = contents[0]
        if first is None or None in contents:
            self._coverage[PAGES_GONE] += 1
            return None
        self._coverage[PAGES_READ] += 1
        return first % SHARDS + self._place.tp_rank * SHARDS

    def remove(self, pool: str, key: bytes) -> None:
        """Lose nothing: what is damaged on its way is whole where it lies."""
