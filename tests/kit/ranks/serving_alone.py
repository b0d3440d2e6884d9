"""Serves prompts one after the other with the cache of a group of one rank."""

from collections.abc import Sequence

from lockstep import Admission, Cache, LoadState

PAGE_TOKENS = 4
IDLE_S = 0.001

Prompt = Sequence[int]
"""A prompt as one number per page. The number determines the tokens of the page."""


def served(cache: Cache, name: str, prompt: Prompt) -> int:
    """Serve a prompt, wait until it is in the store, and return how many of its pages were cached."""
    tokens = [page * PAGE_TOKENS + at for page in prompt for at in range(PAGE_TOKENS)]
    cache.prefetch(name, tokens)
    while not cache.prefetch_done(name):
        cache.step(idle_s=IDLE_S)
    while not isinstance(
        got := cache.load_back(name, tokens, reserve_tokens=len(tokens)), Admission
    ):
        cache.step(idle_s=IDLE_S)
    while cache.load_state(name) is LoadState.LOADING:
        cache.step(idle_s=IDLE_S)
    cache.insert(name, tokens)
    cache.release(name)
    cache.flush()
    return got.cached_tokens // PAGE_TOKENS
