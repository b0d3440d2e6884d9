"""A store that is bounded keeps what was served last, also what was only found in memory since."""

import json
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest

from lockstep import Admission, Cache, CacheConfig, Column, LoadState, PageLayout
from lockstep.coordinator.collectives.in_process import InProcessGroup

PAGE_TOKENS = 4
LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS, columns=(Column(name="kv", layers=1, heads=4, elements=64),)
)
FILE_BYTES = 8 << 10
"""What a page takes as a file, with its header, in blocks of the filesystem."""
TRACE = Path(__file__).parents[3] / "shared/traces/conversation_trace.jsonl"
IDLE_S = 0.001

Prompt = Sequence[int]
"""The pages of a prompt, by the number of their content."""


def opened(store: str, host_pages: int) -> Cache:
    config = CacheConfig(
        model="m", layout=LAYOUT, device_pages=host_pages, host_pages=host_pages, store=store
    )
    return Cache.open(config, InProcessGroup(1).member(0))


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


def lives(store: str, host_pages: int, prompts: Sequence[Prompt]) -> list[int]:
    """Serve all prompts in each of two lives of a cache; return the pages found in each."""
    found: list[int] = []
    for _ in range(2):
        cache = opened(store, host_pages)
        found.append(sum(served(cache, f"r{n}", prompt) for n, prompt in enumerate(prompts)))
        cache.close()
    return found


def ideal(pages_max: int, prompts: Sequence[Prompt]) -> list[int]:
    """What a store finds in each life that removes what was served the longest ago, ends first."""
    kept: OrderedDict[int, None] = OrderedDict()
    found: list[int] = []
    for _ in range(2):
        count = 0
        for prompt in prompts:
            count += next((at for at, page in enumerate(prompt) if page not in kept), len(prompt))
            for page in reversed(prompt):
                kept[page] = None
                kept.move_to_end(page)
            while len(kept) > pages_max:
                kept.popitem(last=False)
        found.append(count)
    return found


def chats(seed: int) -> Iterator[Prompt]:
    """Prompts of chats that go on in turn, each after one of a few system prompts."""
    draw = random.Random(seed)
    systems = [list(range(1000 * n, 1000 * n + 12)) for n in range(1, 4)]
    numbers = iter(range(10_000, 1_000_000))
    going_on: list[list[int]] = []
    while True:
        if len(going_on) < 12 or draw.random() < 0.1:
            going_on.append(list(draw.choice(systems)))
        chat = draw.choice(going_on[-12:])
        chat += islice(numbers, draw.randint(1, 8))
        yield list(chat)


def trace() -> Iterator[Prompt]:
    with TRACE.open() as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def test_a_small_quota_keeps_what_was_served_last(tmp_path: Path) -> None:
    prompts = list(islice(chats(1), 200))
    quota_pages = 500

    found = lives(f"file://{tmp_path}/kv?quota_bytes={quota_pages * FILE_BYTES}", 256, prompts)

    assert found[1] >= 0.95 * ideal(quota_pages, prompts)[1]


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not here")
def test_a_small_quota_keeps_what_a_trace_of_conversations_served_last(tmp_path: Path) -> None:
    prompts = list(islice(trace(), 3000))
    quota_pages = 8000

    found = lives(f"file://{tmp_path}/kv?quota_bytes={quota_pages * FILE_BYTES}", 2000, prompts)

    assert found[1] >= 0.95 * ideal(quota_pages, prompts)[1]
