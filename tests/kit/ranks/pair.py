"""Two groups, of which one computes a prompt and the other goes on with it."""

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise

from lockstep.coordinator.stop_policy import StopPolicy
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.config import CacheConfig
from lockstep.ranks.protocol.outside import Peers
from lockstep.small_engine.contents import KeyedTokens
from lockstep.small_engine.profiles import find_profile
from tests.kit.ranks.lending_engine import lending
from tests.kit.ranks.served_group import ServedGroup

PAGE_TOKENS = 16
TTL_S = 60.0
NAME = "r"


def config_of(profile: str) -> CacheConfig:
    """Return the settings of a group that serves its pages and reads from others."""
    found = find_profile(profile)
    return CacheConfig(
        model=found.name,
        layout=found.layout(PAGE_TOKENS),
        components=found.components(PAGE_TOKENS, 64, 128),
        device_pages=64,
        host_pages=128,
        peers=Peers(),
        # A machine that does much else at the time is not what is tried.
        stop_policy=StopPolicy(base_s=10.0),
    )


class Pair:
    """A group that computes prompts and one that goes on with them out of the first one's memory."""

    def __init__(
        self,
        stack: ExitStack,
        profile: str,
        ranks: tuple[int, int],
        *,
        lends: tuple[bool, bool] = (False, False),
        peers: Peers | None = None,
    ) -> None:
        """Each of the two engines `lends` its device pages, or its cache owns them."""
        config = config_of(profile)
        if peers is not None:
            config = replace(config, peers=peers)
        self.prefill, self.decode = (
            stack.enter_context(closing(ServedGroup(config, size, lends=each)))
            for size, each in zip(ranks, lends, strict=True)
        )
        for cache in self.prefill.caches if lends[0] else ():
            lending(cache).keeps_states = True
        self.source = self.prefill.caches[0].serving_uri

    def compute(self, tokens: KeyedTokens, *stops: int) -> None:
        """Let the first group compute a prompt in chunks and serve it until others can have it."""
        ids = tokens.ids
        prompt = KeyedTokens(ids[: stops[-1]], PAGE_TOKENS)
        self.prefill.admit(NAME, prompt, reserve=len(ids))
        for start, stop in pairwise((0, *stops)):
            self.prefill.compute(NAME, tokens, start, stop)
        self.served(tokens, stops[-1])

    def served(self, tokens: KeyedTokens, length: int) -> None:
        """Wait until others can have the whole pages of the first `length` tokens."""
        ids, whole = tokens.ids[:length], length - length % PAGE_TOKENS

        def is_served(cache: Cache) -> bool:
            return cache.serve(NAME, ids, ttl_s=TTL_S) == whole

        self.prefill.until(is_served)

    def prefetched(self, tokens: KeyedTokens) -> None:
        """Bring what is served to the host of the group that goes on."""
        self.decode.ask(lambda c: c.prefetch(NAME, tokens.ids, source=self.source))
        self.decode.until(lambda cache: cache.prefetch_done(NAME))

    def goes_on(self, tokens: KeyedTokens) -> int:
        """Bring a prompt to the second group and admit it; return how many tokens are cached there."""
        self.prefetched(tokens)
        return self.decode.admit(NAME, tokens, reserve=len(tokens.ids) + PAGE_TOKENS)

    def wrong_pages(self, tokens: KeyedTokens, cached: int) -> int:
        """Let the second group compute what it lacks; return how many of its pages are wrong."""
        length = len(tokens.ids)
        self.decode.compute(NAME, tokens, cached, length)
        return self.decode.wrong_pages(NAME, tokens, length)
