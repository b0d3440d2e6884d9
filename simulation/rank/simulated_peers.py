"""Reads pages from the host memory of another simulated group, like a `peer://` source.

A read takes the parts of a page from one or several ranks of that group. All parts are locked until the
read ends. If one rank does not serve its part, or cuts the read off, the page is missing.
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
    """The page servers of all ranks of a group that serves pages."""

    def __init__(
        self, layouts: Mapping[str, PageLayout], servers: Sequence[SimulatedPageServer]
    ) -> None:
        """Create the group; `layouts` are given by pool, `servers` by rank."""
        self.ranks = len(servers)
        self.layouts = layouts
        self._servers = {
            (pool, layout.shard_name(ShardPlace.of(rank, self.ranks))): server
            for pool, layout in layouts.items()
            for rank, server in enumerate(servers)
        }

    def servers_for(self, pool: str, place: ShardPlace) -> list[SimulatedPageServer]:
        """Return the servers whose shards together contain the shard at `place`."""
        names = _objects_for(self.layouts[pool], place, self.ranks)
        return [self._servers[pool, name] for name in names]


@cache
def _objects_for(layout: PageLayout, place: ShardPlace, ranks: int) -> tuple[str, ...]:
    """Return the names of a group's shards that overlap the shard at `place`.

    The group has `ranks` ranks.
    """
    others = tuple(each.name for each in sources_of(layout, place, ranks))
    return others or (layout.shard_name(place),)


class SimulatedPeers:
    """A `PageSource` with which one rank reads the pages that another group serves."""

    closed = False

    def __init__(self, group: ServingGroup, place: ShardPlace, coverage: Counter[str]) -> None:
        self._group = group
        self._place = place
        self._coverage = coverage
        self._reads = defaultdict[tuple[str, bytes], list[list[PeerRead | None]]](list)
        """Reads in flight, by pool and key. Each read is a list with one entry per server, which is
        None if the server does not serve the page."""

    def touch(self, who: str) -> None:
        """Do nothing, because a serving group is never closed for its readers."""

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
        """Do nothing. After a corrupt read, the page is still intact on the group that serves it."""
