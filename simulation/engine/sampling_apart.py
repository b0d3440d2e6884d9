"""Engines that diverge: one rank gets a command with other tokens, but as many as the other ranks get.

The state digest covers tokens (rule R2), so all ranks must detect the divergence in the next launched
round.
"""

from collections.abc import Callable, Sequence
from functools import partial

from ...ranks.group.cache import Cache
from ...ranks.group.host_cache import HostCache
from ..rank.cluster import AnyCache
from ..world.prompts import TOKEN_BYTES
from ..world.request import EngineRequest, EngineStage
from .engine_pools import EnginePools

Bringing = tuple[str, bytes, Callable[[AnyCache, bytes], object]]
"""A command's name, the tokens that it carries, and a function that gives a cache this command with the
given tokens."""

_NAME = "apart"
"""Name of the request or pin in these commands; the engine uses this name for nothing else."""


def cache_commands(
    requests: Sequence[EngineRequest], namespace: str, prompt: bytes
) -> list[Bringing[Cache]]:
    """Return commands to a `Cache` that carry tokens: a new prompt, or a request's computed tokens."""
    head = prompt[: 2 * TOKEN_BYTES]
    commands: list[Bringing[Cache]] = [
        ("prefetch", prompt, lambda c, t: c.prefetch(_NAME, t, namespace)),
        ("load_back", head, lambda c, t: c.load_back(_NAME, t, namespace)),
        ("pin", prompt, lambda c, t: c.pin(_NAME, t, namespace, ttl_s=1.0)),
    ]
    for each in requests:
        computes = each.stage in (EngineStage.COMPUTING, EngineStage.ANSWERING)
        # Tokens can differ only after the prefix that a request shares with the tree. Insert only if
        # the request has computed such tokens.
        if computes and each.computed > each.shared:
            commands.append(("insert", each.head(each.computed), partial(_insert, each)))
    return commands


def host_cache_commands(
    requests: Sequence[EngineRequest], namespace: str, prompt: bytes, pools: EnginePools
) -> list[Bringing[HostCache]]:
    """Return commands to a `HostCache` that carry tokens: a new prompt or a request's tokens."""
    commands: list[Bringing[HostCache]] = [
        ("prefetch", prompt, lambda c, t: c.prefetch(_NAME, t, namespace)),
        ("hit", prompt, lambda c, t: c.match_host(_NAME, t, namespace)),
        ("admit", prompt, lambda c, t: c.admit(_NAME, t, namespace)),
        ("pin", prompt, lambda c, t: c.pin(_NAME, t, namespace, ttl_s=1.0)),
    ]
    computing = (EngineStage.COMPUTING, EngineStage.ANSWERING)
    for each in requests:
        if each.stage in computing and each.computed:
            computed = each.head(each.computed)
            commands.append(("back_up", computed, partial(_back_up, pools, each)))
            if each.admitted:
                commands.append(("retract", computed, partial(_retract, pools, each)))
    return commands


def bring(caches: Sequence[AnyCache], rank: int, bringing: Bringing[AnyCache]) -> None:
    """Give a command to every rank, with a different last token on `rank`."""
    _, tokens, command = bringing
    other = tokens[:-TOKEN_BYTES] + bytes((tokens[-TOKEN_BYTES] ^ 1,)) + tokens[1 - TOKEN_BYTES :]
    for cache in caches:
        command(cache, other if cache.rank == rank else tokens)


def _insert(request: EngineRequest, cache: Cache, tokens: bytes) -> None:
    cache.insert(request.name, tokens, final=False)


def _back_up(pools: EnginePools, request: EngineRequest, cache: HostCache, tokens: bytes) -> None:
    lent = pools.lend(cache.rank, request, 0, len(request.table), [])
    cache.back_up(request.name, tokens, lent, request.namespace)


def _retract(pools: EnginePools, request: EngineRequest, cache: HostCache, tokens: bytes) -> None:
    last = -(-request.computed * len(request.table) // max(1, request.room))
    lent = pools.lend(cache.rank, request, 0, last, pools.slot(request))
    cache.retract(request.name, tokens, lent)
