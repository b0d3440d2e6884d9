"""Reads from the host memory of another simulated group, like `peer://`.

A read holds the pages of all needed ranks from its start to its end. A page that one of them does not
serve, or cuts off, is missing.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

from ...page_format.page_layout import PageLayout, ShardPlace
from ...page_format.shard_sources import sources_of
from ..world.contents import SHARDS
from .simulated_page_server import PeerRead, SimulatedPageServer

PAGES_READ = "pages read from the other group"
PAGES_GONE = "pages that the other group no longer served"


class ServingGroup:
    """The page servers of all ranks of a group."""

    def __init__(
        self, layouts: Mapping[str, PageLayout], servers: Sequence[SimulatedPageServer]
    ) -> None:
        """Create the group with `layouts` by pool and `servers` by rank."""
        self.ranks = len(servers)
        self.layouts = layouts
        self._servers = {
            (pool, layout.shard_name(ShardPlace.of(rank, self.ranks))): server
            for pool, layout in layouts.items()
            for rank, server in enumerate(servers)
        }

    def servers_for(self, pool: str, place: ShardPlace) -> list[SimulatedPageServer]:
        """Return the servers that together have the shard of `place`."""
        names = _objects_for(self.layouts[pool], place, self.ranks)
        return [self._servers[pool, name] for name in names]


@cache
def _objects_for(layout: PageLayout, place: ShardPlace, ranks: int) -> tuple[str, ...]:
    """Return the names of the shards in a group of `ranks` that overlap the shard of `place`."""
    others = tuple(each.name for each in sources_of(layout, place, ranks))
    return others or (layout.shard_name(place),)


class SimulatedPeers:
    """A group that serves pages, from the view of one rank of another group; see `Origin`."""

    closed = False

    def __init__(self, group: ServingGroup, place: ShardPlace, coverage: Counter[str]) -> None:
        self._group = group
        self._place = place
        self._coverage = coverage
        self._reads = defaultdict[tuple[str, bytes], list[list[PeerRead | None]]](list)
        """Readings of each object in flight, one entry per read."""

    def touch(self, who: str) -> None:
        """See `Origin`; no check is needed."""

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
        """Do nothing: damage in transit does not affect the source page."""
