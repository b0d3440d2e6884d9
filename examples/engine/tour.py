"""Scenes in which one prompt is served with its prefix on different tiers, always with equal output.

Every scene runs in the engine with a cache. Its output is compared with that of one rank without a
cache.
"""

import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache as remembered
from typing import NamedTuple

import numpy as np
from tiny_engine import Engine, Request
from tiny_transformer import Shape, TinyTransformer

from lockstep import Cache, CacheConfig, Column, PageLayout, StopPolicy, StopRule

OUTPUTS = 24
SHARED_TOKENS, OWN_TOKENS = 32, 97
"""Number of tokens with which all prompts begin, like a system prompt; number of tokens that follow and
differ between prompts."""
VISITED = 0
"""Number of the prompt that the tour repeats. The other prompts evict its pages from tier to tier."""


class Scene(NamedTuple):
    """The result of serving some requests: numbers of prompt tokens by the tier they came from."""

    name: str
    prompt: int
    device: int
    host: int
    storage: int
    equal: bool
    """Whether every output token equals the output of one rank without a cache."""
    events: Counter[str]

    @property
    def computed(self) -> int:
        """Number of prompt tokens that were computed because no tier had them."""
        return self.prompt - self.device - self.host - self.storage


def config(shape: Shape, store: str) -> CacheConfig:
    """Return a model's cache settings, with pools so small that they overflow."""
    columns = [
        Column(
            name=name,
            layers=shape.layers,
            heads=shape.kv_heads,
            elements=shape.head_dim,
            dtype="float32",
        )
        for name in ("k", "v")
    ]
    return CacheConfig(
        model="tiny-transformer",
        weights_version="seed 0",
        layout=PageLayout(page_tokens=16, columns=tuple(columns)),
        device_pages=24,
        host_pages=32,
        store=store,
        stop_policy=StopPolicy(rule=StopRule.WAIT_COMPLETE),
    )


@contextmanager
def opened(settings: CacheConfig) -> Generator[Cache]:
    """Open a cache for the block; close it after success and abandon it after an error."""
    cache = Cache.open(settings)
    try:
        for column in settings.layout.columns:
            # Fill the pages with NaN. If the engine reads a page not written before, every token
            # computed from it is wrong, so the error is detected.
            cache.device_pool.column(column.name).fill_(math.nan)
        yield cache
    except BaseException:
        # After an error do not wait for the other ranks. They detect the exit and raise an error that
        # names this rank.
        cache.abandon()
        raise
    cache.close()


def prompt(number: int) -> list[int]:
    """Return the prompt with a given number: the shared tokens, then tokens of this prompt only."""
    shared = np.random.default_rng(SHARED_TOKENS).integers(512, size=SHARED_TOKENS)
    own = np.random.default_rng([number]).integers(512, size=OWN_TOKENS)
    return [*shared.tolist(), *own.tolist()]


@remembered
def without_cache(shape: Shape, number: int) -> list[int]:
    """Return the whole model's output for a prompt, computed on one rank without a cache."""
    return TinyTransformer(shape).alone(prompt(number), OUTPUTS)


def serve(name: str, cache: Cache, model: TinyTransformer, numbers: Sequence[int]) -> Scene:
    """Serve some prompts concurrently, then flush their pages to the store."""
    engine = Engine(cache, model)
    requests = [
        Request(name=f"{name}-{at}", tokens=prompt(number), last=len(prompt(number)) + OUTPUTS)
        for at, number in enumerate(numbers)
    ]
    for request in requests:
        engine.submit(request)
    engine.run()
    cache.flush()
    outputs = [engine.served[each.name].tokens[-OUTPUTS:] for each in requests]
    found = [each.found for each in requests if each.found is not None]
    return Scene(
        name,
        prompt=sum(len(prompt(number)) for number in numbers),
        device=sum(each.device_tokens for each in found),
        host=sum(each.host_tokens for each in found),
        storage=sum(each.storage_tokens for each in found),
        equal=outputs == [without_cache(model.shape, number) for number in numbers],
        events=engine.events,
    )


def tour(settings: CacheConfig, model: TinyTransformer) -> Iterator[Scene]:
    """Yield the scenes: the repeated prompt on each tier, then many prompts at once."""
    with opened(settings) as cache:
        yield serve("first time", cache, model, [VISITED])
        yield serve("again", cache, model, [VISITED])
        yield serve("three others", cache, model, [1, 2, 3])
        yield serve("again, off the device", cache, model, [VISITED])
        yield serve("five others", cache, model, range(4, 9))
        yield serve("again, off the host", cache, model, [VISITED])
    with opened(settings) as cache:
        yield serve("after a restart", cache, model, [VISITED])
        yield serve("all at once", cache, model, [9, 10, 11, 12, VISITED, VISITED])
