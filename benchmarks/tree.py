"""Cost of the prefix tree: match, insert, lock and unlock, evict, compared with memcmp.

The timed calls are those of an engine, with the tokens in a numpy array of int32:

- `match`: `cache.match` of a prompt that is fully cached.
- `insert`: `cache.insert` for an admitted request. The first half of its prompt is cached already.
- `lock_unlock`: `cache.load_back` of a fully cached prompt, which locks it, and `release`. A match is
  included, because an engine has no other way to lock.
- `evict_64_leaves`: `cache.load_back` that reserves the pages of 64 nodes in a pool without free pages.

The lower bound is the duration of `copy.startswith(prompt)`, timed right before each call: one memcmp
of the call's token array with a copy of its bytes.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypedDict

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from ..errors import ConfigError
from .cached_prompts import (
    COMPONENTS,
    GROUP_NODES,
    NOTHING,
    CachedPrompts,
    TokenArray,
    TreeShape,
)

OPS = ("match", "insert", "lock_unlock", "evict_64_leaves")
LEAVES = 2 * GROUP_NODES
"""The number of leaves that one eviction removes: two groups of nodes, including the shared nodes,
which become leaves during the eviction."""
DEEP_PATH_NODES = 128
INSERTS_MAX = 50
"""The maximum number of timed inserts. It is low because each insert leaves half a prompt in the tree.
"""
EVICTIONS_MAX = 100


class TreePoint(TypedDict):
    """One measurement: the median time of one call in one tree."""

    op: str
    tokens: int
    """The number of tokens in the measured prompt. For an eviction: the number in all evicted nodes."""
    nodes: int
    page_tokens: int
    components: str
    path_nodes: int
    """The number of tree nodes that the prompt spans; 0 for an eviction."""
    p50_us: float
    limit_us: float


class TreeReport(TypedDict):
    """The report of `lockstep bench tree`."""

    points: list[TreePoint]
    repetitions: int
    python: str
    machine: str
    cpus: int


Numbers = Annotated[tuple[int, ...], Parameter(validator=Number(gte=1))]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The options of `lockstep bench tree`."""

    tokens: Annotated[Numbers, Parameter(show_default="1k, 8k, 32k, 128k")] = (
        *(1 << 10, 1 << 13, 1 << 15, 1 << 17),
    )
    """Tokens per prompt; the option may be repeated."""
    nodes: Annotated[
        tuple[int, ...],
        Parameter(validator=Number(gte=2 * LEAVES), show_default="1,000 and 100,000"),
    ] = (1_000, 100_000)
    """Nodes in the prefix tree; the option may be repeated."""
    page_tokens: Annotated[Numbers, Parameter(show_default="16 and 64")] = (16, 64)
    """Tokens per KV page; the option may be repeated."""
    components: Annotated[
        tuple[str, ...], Parameter(choices=COMPONENTS, show_default="all there are")
    ] = COMPONENTS
    """The model's components; the option may be repeated."""
    repetitions: Annotated[int, Parameter(validator=Number(gte=1))] = 500
    """How often each call is timed; the report has the median."""

    def __post_init__(self) -> None:
        if min(self.tokens) < 2 * max(self.page_tokens):
            raise ConfigError(
                f"--tokens is {min(self.tokens)}, must be two pages of {max(self.page_tokens)} or more"
            )

    def shapes(self) -> list[TreeShape]:
        return [
            TreeShape(nodes=nodes, page_tokens=page_tokens, components=components)
            for components in self.components
            for page_tokens in self.page_tokens
            for nodes in self.nodes
        ]

    def prompts(self, page_tokens: int) -> list[tuple[int, int]]:
        """Return (number of tokens, number of tree nodes) of each prompt.

        Longer prompts span more nodes. The longest prompt is measured a second time, spanning as many
        nodes as a prompt of a long conversation.
        """
        prompts = [(each, min(_path_nodes(each), each // page_tokens)) for each in self.tokens]
        longest = max(self.tokens)
        return [*prompts, (longest, min(DEEP_PATH_NODES, longest // page_tokens))]


def _path_nodes(tokens: int) -> int:
    return next(
        (n for bound, n in ((1 << 10, 2), (1 << 13, 4), (1 << 15, 8)) if tokens <= bound), 16
    )


def run(sizes: Sizes, tell: Callable[[str], None] = lambda _what: None) -> TreeReport:
    """Run the benchmark; `tell` receives progress messages."""
    points: list[TreePoint] = []
    for shape in sizes.shapes():
        tell(f"{shape.components}, pages of {shape.page_tokens}, {shape.nodes:,} nodes")
        points.extend(_measure_tree(sizes, shape))
    return TreeReport(
        points=points,
        repetitions=sizes.repetitions,
        python=platform.python_version(),
        machine=platform.platform(),
        cpus=os.cpu_count() or 1,
    )


def _measure_tree(sizes: Sizes, shape: TreeShape) -> Iterator[TreePoint]:
    prompts = sizes.prompts(shape.page_tokens)
    inserts = min(sizes.repetitions, INSERTS_MAX)
    # Leave enough pages free for each prompt, for one page of a branch at each of the prompt's nodes,
    # and for half a prompt per insert.
    spare = sum(
        tokens + path_nodes * shape.page_tokens + inserts * (tokens // 2 + shape.page_tokens)
        for tokens, path_nodes in prompts
    )
    cached = CachedPrompts(shape, spare_tokens=spare)
    try:
        yield _evict(cached, min(sizes.repetitions, EVICTIONS_MAX))
        cached.open_spare_room()
        for tokens, path_nodes in prompts:
            prompt = cached.random_tokens(tokens)
            cached.add_prompt(prompt, path_nodes)
            for op, measure, repetitions in (
                ("match", _match, sizes.repetitions),
                ("lock_unlock", _lock_unlock, sizes.repetitions),
                ("insert", _insert, inserts),
            ):
                p50_us, limit_us = _interleaved(measure(cached, prompt), prompt, repetitions)
                yield _point(
                    shape,
                    op,
                    tokens=tokens,
                    path_nodes=path_nodes,
                    p50_us=p50_us,
                    limit_us=limit_us,
                )
    finally:
        cached.close()


def _point(
    shape: TreeShape, op: str, *, tokens: int, path_nodes: int, p50_us: float, limit_us: float
) -> TreePoint:
    return TreePoint(
        op=op,
        tokens=tokens,
        nodes=shape.nodes,
        page_tokens=shape.page_tokens,
        components=shape.components,
        path_nodes=path_nodes,
        p50_us=round(p50_us, 2),
        limit_us=round(limit_us, 2),
    )


Steps = Iterator[Callable[[], object]]
"""An iterator of calls to time, one per repetition. Between two calls it prepares the next repetition.
"""


def _match(cached: CachedPrompts, prompt: TokenArray) -> Steps:
    call = partial(cached.cache.match, prompt)
    if call().device_tokens != len(prompt) - len(prompt) % cached.shape.page_tokens:
        raise RuntimeError("the prompt is not fully cached")
    while True:
        yield call


def _lock_unlock(cached: CachedPrompts, prompt: TokenArray) -> Steps:
    cache = cached.cache

    def call() -> None:
        cache.load_back("locked", prompt)
        cache.release("locked")

    while True:
        yield call


def _insert(cached: CachedPrompts, prompt: TokenArray) -> Steps:
    cache, half = cached.cache, len(prompt) // 2
    while True:
        tokens = np.concatenate([prompt[:half], cached.random_tokens(len(prompt) - half)])
        name = cached.next_request()
        cache.load_back(name, tokens, reserve_tokens=len(tokens))
        yield partial(cache.insert, name, tokens)
        cache.release(name)


def _evictions(cached: CachedPrompts, tokens: int) -> Steps:
    cache = cached.cache
    while True:
        yield partial(cache.load_back, "evicting", NOTHING, reserve_tokens=tokens)
        cache.release("evicting")
        for _ in range(LEAVES // GROUP_NODES):
            cached.add_group()


def _evict(cached: CachedPrompts, repetitions: int) -> TreePoint:
    tokens = LEAVES * cached.shape.leaf_tokens
    steps = _evictions(cached, tokens)
    p50_us, limit_us = _interleaved(steps, cached.random_tokens(tokens), repetitions)
    # Release the pages that the last timed eviction reserved.
    next(steps)
    return _point(
        cached.shape,
        "evict_64_leaves",
        tokens=tokens,
        path_nodes=0,
        p50_us=p50_us,
        limit_us=limit_us,
    )


def _interleaved(steps: Steps, prompt: TokenArray, repetitions: int) -> tuple[float, float]:
    """Return the median microseconds of the timed calls and of a memcmp of the prompt's bytes."""
    given, copy = prompt.data.cast("B"), prompt.tobytes()
    clock = time.perf_counter_ns
    called: list[int] = []
    compared: list[int] = []
    for _ in range(repetitions):
        call = next(steps)
        began = clock()
        copy.startswith(given)
        between = clock()
        call()
        ended = clock()
        compared.append(between - began)
        called.append(ended - between)
    return statistics.median(called) / 1000, statistics.median(compared) / 1000
