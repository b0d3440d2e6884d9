"""A group with real caches and a simulated model that writes known bytes. Each rank is a thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.agreed_pools import shard_layouts
from lockstep.ranks.protocol.answers import Admission
from lockstep.ranks.protocol.config import CacheConfig
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.tree.node import DEVICE, HOST
from lockstep.small_engine.contents import KeyedTokens, PageContents
from lockstep.small_engine.forward_pass import ForwardPass, TokenSpan
from tests.kit.ranks.executor_parts import hashed_keys
from tests.kit.ranks.lending_engine import LendingEngine

T = TypeVar("T")

STEPS_MAX = 20_000
"""Number of steps after which a wait fails."""


class ServedGroup:
    """The caches of one group. Every rank runs the same commands in a separate thread.

    The caller closes the group.
    """

    def __init__(self, config: CacheConfig, ranks: int, *, lends: bool = False) -> None:
        """If `lends` is True, each rank is a `LendingEngine`, which owns its device pages."""
        self._threads = ThreadPoolExecutor(ranks)
        members = InProcessGroup(ranks)
        start = cast("Callable[..., Cache]", LendingEngine.start) if lends else Cache.open
        opening = [
            self._threads.submit(start, config, members.member(rank)) for rank in range(ranks)
        ]
        self.caches = [each.result() for each in opening]
        self.forwards = [ForwardPass(cache) for cache in self.caches]
        self._page_tokens = config.layout.page_tokens

    def begin(self, program: Callable[[Cache, ForwardPass], T]) -> "list[Future[T]]":
        """Start a program on every rank's thread; return the futures at once."""
        pairs = zip(self.caches, self.forwards, strict=True)
        return [self._threads.submit(program, *pair) for pair in pairs]

    def ask(self, work: Callable[[Cache], T]) -> T:
        """Run `work` on every rank; return its result, which must be equal on all ranks."""
        answers = list(self._threads.map(work, self.caches))
        assert all(each == answers[0] for each in answers), answers
        return answers[0]

    def until(self, work: Callable[[Cache], bool]) -> None:
        """Step every rank until `work` returns True; all ranks must need the same number of steps."""

        def step(cache: Cache) -> int:
            for number in range(STEPS_MAX):
                if work(cache):
                    return number
                cache.step(idle_s=0.005)
            raise AssertionError("what was waited for did not come")

        steps = list(self._threads.map(step, self.caches))
        assert len(set(steps)) == 1, steps

    def admit(self, name: str, tokens: KeyedTokens, *, reserve: int) -> int:
        """Admit a request and wait until its load is done; return the number of cached tokens."""
        ids = tokens.ids
        answer = self.ask(lambda cache: cache.load_back(name, ids, reserve_tokens=reserve))
        assert isinstance(answer, Admission)
        self.until(lambda cache: cache.load_state(name) is LoadState.READY)
        return answer.cached_tokens

    def compute(self, name: str, tokens: KeyedTokens, start: int, stop: int) -> None:
        """Compute tokens `start` to `stop`; insert the request's pages and a partial last page."""

        def chunk(forward: ForwardPass) -> None:
            span = TokenSpan(request=name, tokens=tokens, start=start, stop=stop)
            forward.compute([span])
            forward.begin_page(name, tokens, stop)

        list(self._threads.map(chunk, self.forwards))
        self.ask(lambda cache: cache.insert(name, tokens.ids[:stop], final=False))

    def wrong_pages(self, name: str, tokens: KeyedTokens, computed: int) -> int:
        """Return the number of a request's pages with wrong bytes, summed over all ranks."""

        def wrong(forward: ForwardPass) -> int:
            compared = forward.verify(name, tokens, computed, moved=True)
            assert sum(each.pages for each in compared.values())
            return sum(each.corrupt for each in compared.values())

        return sum(self._threads.map(wrong, self.forwards))

    def kept(self) -> list[list[int]]:
        """Return how many of the tree's pages may not be evicted, by tier and component."""
        return self.ask(
            lambda cache: [
                list(cache.inspection.prefixes.allocator.ref_counts.kept_pages[tier])
                for tier in (DEVICE, HOST)
            ]
        )

    def close(self) -> None:
        """Close every rank's cache. Idempotent."""
        caches, self.caches = self.caches, []
        for ended in [self._threads.submit(each.close, flush=False) for each in caches]:
            ended.result()
        self._threads.shutdown()


def served(cache: Cache, name: str, tokens: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Serve a prompt on one rank as an engine does, and wait until its pages are in the store.

    The prompt's last token is always computed. Return the number of cached tokens, and the number of
    cached pages that hold wrong bytes on this rank.
    """
    prompt, unit = tokens[:-1], cache.config.layout.page_tokens
    cache.prefetch(name, prompt)
    while not cache.prefetch_done(name):
        cache.step(idle_s=0.005)
    admission = cache.load_back(name, prompt, reserve_tokens=len(tokens))
    assert isinstance(admission, Admission)
    while cache.load_state(name) is LoadState.LOADING:
        cache.step(idle_s=0.005)
    contents = PageContents(shard_layouts(cache.config, cache.rank, cache.world_size)[KV_POOL])
    pages, cached = cache.page_table(name), admission.cached_tokens // unit
    whole = len(tokens) // unit
    keys = hashed_keys(whole)
    bad = contents.verify(cache.device_pool, pages[:cached], keys[:cached])
    contents.fill(cache.device_pool, pages[cached:whole], keys[cached:])
    cache.insert(name, prompt)
    cache.release(name)
    assert cache.flush()
    return admission.cached_tokens, bad


def keyed(seed: int, length: int, page_tokens: int) -> KeyedTokens:
    """Return a random prompt of `length` tokens that depends on `seed`."""
    ids = np.random.default_rng(seed).integers(0, 1 << 20, length, dtype=np.int32)
    return KeyedTokens(ids, page_tokens)
