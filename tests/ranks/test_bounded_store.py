"""A bounded store keeps the most recently used pages, even if engines found them only in memory."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest

from lockstep import Cache, CacheConfig, Column, PageLayout
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.storage_backends.file.sweep import LOW_WATER
from tests.kit.ranks.serving_alone import PAGE_TOKENS, Prompt, served

LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS, columns=(Column(name="kv", layers=1, heads=4, elements=64),)
)
FILE_BYTES = 8 << 10
"""The size in bytes of one page's file with its header, rounded up to whole filesystem blocks."""
TRACE = Path(__file__).parents[3] / "shared/traces/conversation_trace.jsonl"


def opened(store: str, host_pages: int) -> Cache:
    config = CacheConfig(
        model="m", layout=LAYOUT, device_pages=host_pages, host_pages=host_pages, store=store
    )
    return Cache.open(config, InProcessGroup(1).member(0))


def found_after(store: str, host_pages: int, first: list[Prompt], later: list[Prompt]) -> int:
    """Serve prompts in two runs of a cache; return the number of cached pages in the second run."""
    found = 0
    for prompts in (first, later):
        cache = opened(store, host_pages)
        found = sum(served(cache, f"r{n}", prompt) for n, prompt in enumerate(prompts))
        cache.close()
    return found


def ideal(pages_max: int, first: list[Prompt], later: list[Prompt]) -> int:
    """Return the hits of an ideal LRU store for `pages_max` pages, which evicts prompts' ends first.

    After a sweep, a real store is filled to its low watermark. It must have at least as many hits as an
    ideal store of that size.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    found = 0
    for prompts in (first, later):
        found = 0
        for prompt in prompts:
            found += next((at for at, page in enumerate(prompt) if page not in kept), len(prompt))
            for page in reversed(prompt):
                kept[page] = None
                kept.move_to_end(page)
            while len(kept) > pages_max:
                kept.popitem(last=False)
    return found


def chats(count: int) -> list[Prompt]:
    """Return prompts with one shared system prompt; each seventh prompt is a turn of a growing chat."""
    system = list(range(40))
    prompts: list[Prompt] = []
    for number in range(1, count + 1):
        prompts.append([*system, *range(100 * number, 100 * number + 10)])
        if number % 6 == 0:
            prompts.append(range(1_000_000, 1_000_000 + number))
    return prompts


def trace() -> list[Prompt]:
    with TRACE.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def test_a_small_quota_keeps_what_was_served_last_though_memory_answered_for_it(
    tmp_path: Path,
) -> None:
    prompts = chats(120)
    later = prompts[:-30:-1]
    quota_pages = 600

    found = found_after(
        f"file://{tmp_path}/kv?quota_bytes={quota_pages * FILE_BYTES}", 256, prompts, later
    )

    assert found >= ideal(int(LOW_WATER * quota_pages), prompts, later)


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not here")
def test_a_small_quota_keeps_what_a_trace_of_conversations_served_last(tmp_path: Path) -> None:
    prompts = trace()[:3000]
    quota_pages = 8000

    found = found_after(
        f"file://{tmp_path}/kv?quota_bytes={quota_pages * FILE_BYTES}", 2000, prompts, prompts
    )

    assert found >= ideal(int(LOW_WATER * quota_pages), prompts, prompts)
