"""A prefill group that computes a prompt, and a decode group that continues it after a handoff."""

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise

from lockstep.coordinator.stop_policy import StopPolicy
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.config import CacheConfig
from lockstep.ranks.protocol.network_config import Peers
from lockstep.small_engine.contents import KeyedTokens
from lockstep.small_engine.profiles import find_profile
from tests.kit.ranks.lending_engine import lending
from tests.kit.ranks.served_group import ServedGroup

PAGE_TOKENS = 16
TTL_S = 60.0
NAME = "r"


def config_of(profile: str) -> CacheConfig:
    """Return the settings of a group that serves pages to peers and reads pages from peers."""
    found = find_profile(profile)
    return CacheConfig(
        model=found.name,
        layout=found.layout(PAGE_TOKENS),
        components=found.components(PAGE_TOKENS, 64, 128),
        device_pages=64,
        host_pages=128,
        peers=Peers(),
        # A long timeout, so that no prefetch stops early on a busy machine.
        stop_policy=StopPolicy(base_s=10.0),
    )


class Pair:
    """A prefill group, and a decode group that reads the prefill group's host pages."""

    def __init__(
        self,
        stack: ExitStack,
        profile: str,
        ranks: tuple[int, int],
        *,
        lends: tuple[bool, bool] = (False, False),
        peers: Peers | None = None,
    ) -> None:
        """`lends` has two flags, for prefill and decode: whether an engine owns the device pages."""
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
        """Compute a prompt on the prefill group, and wait until its pages are published.

        The chunks end at the positions `stops`.
        """
        ids = tokens.ids
        prompt = KeyedTokens(ids[: stops[-1]], PAGE_TOKENS)
        self.prefill.admit(NAME, prompt, reserve=len(ids))
        for start, stop in pairwise((0, *stops)):
            self.prefill.compute(NAME, tokens, start, stop)
        self.served(tokens, stops[-1])

    def served(self, tokens: KeyedTokens, length: int) -> None:
        """Wait until the prefill group has published all full pages of the first `length` tokens."""
        ids, whole = tokens.ids[:length], length - length % PAGE_TOKENS

        def is_served(cache: Cache) -> bool:
            return cache.serve(NAME, ids, ttl_s=TTL_S) == whole

        self.prefill.until(is_served)

    def prefetched(self, tokens: KeyedTokens) -> None:
        """Prefetch the prompt's published pages into the host tier of the decode group."""
        self.decode.ask(lambda c: c.prefetch(NAME, tokens.ids, source=self.source))
        self.decode.until(lambda cache: cache.prefetch_done(NAME))

    def goes_on(self, tokens: KeyedTokens) -> int:
        """Prefetch and admit a prompt on the decode group; return the number of its cached tokens."""
        self.prefetched(tokens)
        return self.decode.admit(NAME, tokens, reserve=len(tokens.ids) + PAGE_TOKENS)

    def wrong_pages(self, tokens: KeyedTokens, cached: int) -> int:
        """Compute the rest of a prompt on the decode group; return how many of its pages are wrong."""
        length = len(tokens.ids)
        self.decode.compute(NAME, tokens, cached, length)
        return self.decode.wrong_pages(NAME, tokens, length)
