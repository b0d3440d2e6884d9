"""One prompt served repeatedly with its prefix on different tiers, always with equal output.

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
"""Every prompt begins with the same tokens, like a system prompt, followed by different ones."""
VISITED = 0
"""The prompt that is repeated; the other prompts evict it from tier to tier."""


class Scene(NamedTuple):
    """The result of serving some requests: prompt tokens by the tier they came from."""

    name: str
    prompt: int
    device: int
    host: int
    storage: int
    equal: bool
    """Whether every token equals the output of one rank without a cache."""
    events: Counter[str]

    @property
    def computed(self) -> int:
        """Prompt tokens that were not cached."""
        return self.prompt - self.device - self.host - self.storage


def config(shape: Shape, store: str) -> CacheConfig:
    """Return cache settings for a model, with pools small enough to overflow."""
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
    """Open a cache; close it after success and abandon it after an error."""
    cache = Cache.open(settings)
    try:
        for column in settings.layout.columns:
            # NaN in unwritten pages spoils every token computed from them, so misuse is detected.
            cache.device_pool.column(column.name).fill_(math.nan)
        yield cache
    except BaseException:
        # Do not wait for other ranks; they detect the exit and raise an error naming this rank.
        cache.abandon()
        raise
    cache.close()


def prompt(number: int) -> list[int]:
    """Return a prompt by number: the shared tokens, then its private ones."""
    shared = np.random.default_rng(SHARED_TOKENS).integers(512, size=SHARED_TOKENS)
    own = np.random.default_rng([number]).integers(512, size=OWN_TOKENS)
    return [*shared.tolist(), *own.tolist()]


@remembered
def without_cache(shape: Shape, number: int) -> list[int]:
    """Return the output of the whole model on one rank for a prompt."""
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
