"""Probe of a cache with nothing in flight: every device page must be allocatable to requests."""

from collections.abc import Sequence

from ...ranks.group.cache import Cache
from ...ranks.protocol.answers import Wait
from ...ranks.protocol.config import WritePolicy
from ..rank.cluster import ask
from ..world.violated import not_to_be_had
from ..world.world import World
from .every_rank import NO_PAGE


def probe(caches: Sequence[Cache], world: World) -> bool:
    """Reserve all device pages for one request, and each further state slot for a request of its own.

    Raise `Violated` if the cache refuses although its pages must be free. Return False if more steps
    are needed first: under write-back, evicted pages must be backed up before they are free.
    """
    pools, states = world.pools, world.state_pools
    pages = min(device for pool, (device, _) in pools.items() if pool not in states)
    count = max((pools[pool][0] for pool in states), default=1)
    names = [f"probe{number}" for number in range(count)]
    tokens = [pages * world.page_tokens] + [0] * (count - 1)
    # Reserve for every request, even after one was refused, because all are released afterwards.
    had = [_reserve(caches, world, *each) for each in zip(names, tokens, strict=True)]
    for pool, (device, _) in pools.items() if all(had) else ():
        table = [page for name in names for page in _table(caches, name, pool)]
        wanted = device if pool in states else pages
        if len(table) != wanted or len(set(table)) != wanted or NO_PAGE in table:
            raise not_to_be_had(f"{wanted} device {pool} pages", table)
    for name in names:
        _let_go(caches, name)
    return all(had)


def _let_go(caches: Sequence[Cache], name: str) -> None:
    ask(f"release of request {name}", caches, lambda c: c.release(name))


def _table(caches: Sequence[Cache], name: str, pool: str) -> list[int]:
    what = f"page_table of {pool} of request {name}"
    return ask(what, caches, lambda c: c.page_table(name, pool).tolist())


def _reserve(caches: Sequence[Cache], world: World, name: str, tokens: int) -> bool:
    answer = ask(
        "load_back of nothing", caches, lambda c: c.load_back(name, b"", reserve_tokens=tokens)
    )
    if not isinstance(answer, Wait):
        return True
    if caches[0].config.write_policy is not WritePolicy.WRITE_BACK:
        raise not_to_be_had(f"{tokens // world.page_tokens} device pages", answer.value)
    return False
