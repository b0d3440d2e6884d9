"""Two groups, of which one computes a request and the other goes on with it."""

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count, pairwise

from lockstep.coordinator.stop_policy import StopPolicy
from lockstep.ranks.cache import Cache
from lockstep.ranks.config import CacheConfig
from lockstep.ranks.outside import Peers
from lockstep.ranks.replica.extent import Extent
from lockstep.ranks.replica.requests import LoadState
from lockstep.small_engine.contents import KeyedTokens
from lockstep.small_engine.profiles import find_profile
from lockstep.small_engine.request import TokenIds
from tests.kit.ranks.served_group import ServedGroup

PAGE_TOKENS = 16
TTL_S = 60.0
NAME = "r"

_PAIRS = count()


def config_of(profile: str, *, store: str | None) -> CacheConfig:
    found = find_profile(profile)
    return CacheConfig(
        model=found.name,
        layout=found.layout(PAGE_TOKENS),
        components=found.components(PAGE_TOKENS, 64, 128),
        device_pages=64,
        host_pages=128,
        store=store,
        peers=None if store else Peers(),
        # A machine that does much else at the time is not what is tried.
        stop_policy=StopPolicy(base_s=10.0),
    )


class Pair:
    """A group that prefills and one that decodes, joined by a store or by the first one's memory."""

    def __init__(
        self,
        stack: ExitStack,
        profile: str,
        ranks: tuple[int, int],
        *,
        store: str | None,
        lends: tuple[bool, bool] = (False, False),
        peers: Peers | None = None,
    ):
        """Each of the two engines `lends` its device pages, or its cache owns them."""
        # A store in memory is shared by all in this process that name it.
        config = config_of(profile, store=store and f"{store}-{next(_PAIRS)}")
        if peers is not None:
            config = replace(config, peers=peers)
        self.prefill, self.decode = (
            stack.enter_context(closing(ServedGroup(config, size, lends=each)))
            for size, each in zip(ranks, lends, strict=True)
        )
        self.source = "" if store else self.prefill.caches[0].serving_uri

    def give(self, cache: Cache, ids: TokenIds) -> int:
        """Let others have what is computed; return how much of it they can have by now."""
        return cache.serve(NAME, ids, ttl_s=TTL_S) if self.source else cache.offer(NAME, ids)

    def offered(self, tokens: KeyedTokens, length: int) -> None:
        """Wait until others can have the first `length` tokens, in whole pages or with the tail."""
        ids, goal = tokens.ids[:length], length // PAGE_TOKENS * PAGE_TOKENS
        self.prefill.until(lambda cache: goal <= self.give(cache, ids))

    def prefetched(self, tokens: KeyedTokens, length: int, extent: Extent) -> None:
        """Bring what is offered to the host of the group that decodes."""
        ids = tokens.ids[:length]
        self.decode.ask(lambda c: c.prefetch(NAME, ids, extent=extent, source=self.source))
        self.decode.until(lambda cache: cache.prefetch_done(NAME))

    def save(self, tokens: KeyedTokens) -> None:
        """Take the request that has computed all of its tokens off the device, and offer it whole."""
        ids = tokens.ids
        assert self.prefill.ask(lambda cache: cache.retract(NAME, ids))
        self.prefill.until(lambda cache: cache.load_state(NAME) is LoadState.SAVED)
        self.prefill.until(lambda cache: len(ids) == self.give(cache, ids))


def hand_over(pair: Pair, tokens: KeyedTokens, chunks: tuple[int, ...]) -> int:
    """Move a request that is computed in chunks; return how many tokens are cached where it goes on."""
    length = len(tokens.ids)
    assert pair.prefill.admit(NAME, KeyedTokens(tokens.ids[:0], PAGE_TOKENS), reserve=length) == 0
    for start, stop in pairwise((0, *chunks, length)):
        pair.prefill.compute(NAME, tokens, start, stop)
        pair.offered(tokens, stop)
        pair.prefetched(tokens, stop, Extent.KV)
    pair.save(tokens)
    pair.prefetched(tokens, length, Extent.ALL)
    return pair.decode.admit(NAME, tokens, reserve=length + PAGE_TOKENS)
