"""Pages that another process removed from a store are written again at their next use in memory."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep import Cache, CacheConfig, Column, PageLayout
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from lockstep.ranks.replica.operations.store import RENEWED_PART
from lockstep.storage_backends.base import StorageBackend
from lockstep.storage_backends.registry import make_backend
from tests.kit.ranks.serving_alone import PAGE_TOKENS, served
from tests.kit.storage.calls import soon

HOST_PAGES = 64
LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS, columns=(Column(name="kv", layers=1, heads=4, elements=8),)
)
WINDOW = SlidingWindow(window_tokens=2 * PAGE_TOKENS, layout=LAYOUT, device_pages=64, host_pages=64)
STATE = Recurrent(
    checkpoint_tokens=2 * PAGE_TOKENS,
    layout=replace(LAYOUT, page_tokens=1),
    device_pages=64,
    host_pages=64,
)
COMPONENTS: dict[str, tuple[SlidingWindow | Recurrent, ...]] = {
    "full attention": (),
    "window": (WINDOW,),
    "state": (STATE,),
    "both": (WINDOW, STATE),
}
PROMPT = range(12)


@contextmanager
def cache_on(store: str, components: str) -> Generator[Cache]:
    config = CacheConfig(
        model="m",
        layout=LAYOUT,
        components=COMPONENTS[components],
        device_pages=HOST_PAGES,
        host_pages=HOST_PAGES,
        store=store,
    )
    cache = Cache.open(config, InProcessGroup(1).member(0))
    try:
        yield cache
    finally:
        cache.close()


@pytest.fixture(params=["file", "3fs", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "file": f"file://{tmp_path}/kv",
        "3fs": f"3fs://{tmp_path}/kv?index=sqlite://{tmp_path}/index.db",
        "memory": f"memory://{tmp_path.name.replace('_', '-')}",
    }[request.param]


async def remove_everything(backend: StorageBackend) -> int:
    """Remove everything as `lockstep store rm --all` does; return the number of objects removed."""
    names = [stored.name async for stored in backend.objects()]
    assert all(await backend.remove(names, deadline=soon()))
    return len(names)


@pytest.mark.parametrize("components", COMPONENTS)
def test_what_was_removed_while_it_was_in_memory_is_written_again_when_it_is_used(
    store: str, components: str
) -> None:
    with asyncio.Runner() as runner:
        behind = make_backend(store)
        runner.run(behind.open())
        with cache_on(store, components) as cache:
            served(cache, "first", PROMPT)
            assert runner.run(remove_everything(behind)) >= len(PROMPT)
            for number in range(HOST_PAGES // RENEWED_PART):
                served(cache, f"other {number}", [1000 + number])
            in_memory = served(cache, "again", PROMPT)
        with cache_on(store, components) as cache:
            found = served(cache, "later", PROMPT)
        runner.run(behind.close())

    assert in_memory >= len(PROMPT) - 2
    assert found >= in_memory
