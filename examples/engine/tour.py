"""One prompt again and again, each time with its prefix in another place, and the same tokens out.

Every scene is served by the engine through a cache, and compared with what one rank alone computes
without any.
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
"""Every prompt begins with the same tokens, as a system prompt, and goes on with its own."""
VISITED = 0
"""The prompt that comes again and again; the others push it from tier to tier."""


class Scene(NamedTuple):
    """What became of some requests: tokens of their prompts, by where they came from."""

    name: str
    prompt: int
    device: int
    host: int
    storage: int
    equal: bool
    """Whether every token is what the whole model computes on one rank without a cache."""
    events: Counter[str]

    @property
    def computed(self) -> int:
        """The prompt tokens that were not cached."""
        return self.prompt - self.device - self.host - self.storage


def config(shape: Shape, store: str) -> CacheConfig:
    """Return the settings of a cache for a model, with pools so small that they overflow."""
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
    """Open a cache, and leave the group in the way that fits how the block has ended."""
    cache = Cache.open(settings)
    try:
        for column in settings.layout.columns:
            # What nobody has computed or loaded spoils every token that is computed from it.
            cache.device_pool.column(column.name).fill_(math.nan)
        yield cache
    except BaseException:
        # The others notice, and end with an error that names this rank; nobody is waited for.
        cache.abandon()
        raise
    cache.close()


def prompt(number: int) -> list[int]:
    """Return a prompt by its number: what all begin with, and then its own."""
    shared = np.random.default_rng(SHARED_TOKENS).integers(512, size=SHARED_TOKENS)
    own = np.random.default_rng([number]).integers(512, size=OWN_TOKENS)
    return [*shared.tolist(), *own.tolist()]


@remembered
def without_cache(shape: Shape, number: int) -> list[int]:
    """Return what the whole model, on one rank, puts out after a prompt."""
    return TinyTransformer(shape).alone(prompt(number), OUTPUTS)


def serve(name: str, cache: Cache, model: TinyTransformer, numbers: Sequence[int]) -> Scene:
    """Serve some prompts at the same time, and have what they computed in the store."""
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
    """Yield what becomes of the visited prompt, wherever its prefix is, and of many at once."""
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
