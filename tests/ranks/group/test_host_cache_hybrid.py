"""A hybrid model with engine-owned device pages: real tensors, real copies, real files.

The engine's tensors have tokens first for full attention and a window, and slots for a recurrent state.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import AxisOrder, EnginePages
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import HostCacheConfig, Recurrent, SlidingWindow
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.ranks.replica.operations.lent import NO_PAGE
from lockstep.ranks.replica.operations.requests import LoadState

TOKENS, HEADS, ELEMENTS, BLOCKS, SLOTS = 4, 2, 3, 24, 6
PAGES = PageLayout(
    page_tokens=TOKENS,
    columns=(Column(name="k", layers=2, heads=HEADS, elements=ELEMENTS, dtype="float32"),),
)
STATE = PageLayout(
    page_tokens=1, columns=(Column(name="ssm", layers=1, heads=HEADS, elements=5, dtype="float32"),)
)
PROMPT = list(range(6 * TOKENS))


def config(store: Path) -> HostCacheConfig:
    return HostCacheConfig(
        model="hybrid",
        layout=PAGES,
        host_pages=32,
        components=(
            SlidingWindow(window_tokens=2 * TOKENS, layout=PAGES, host_pages=32),
            Recurrent(checkpoint_tokens=TOKENS, layout=STATE, host_pages=8),
        ),
        store=f"file://{store}?durability=none",
        populate_host=False,
    )


class Engine:
    def __init__(self, store: Path) -> None:
        shape = (BLOCKS, TOKENS, HEADS, ELEMENTS)
        self.kv = [torch.rand(shape) for _ in range(2)]
        self.window = [torch.rand(shape) for _ in range(2)]
        self.state = [torch.rand(SLOTS, 1, HEADS, 5)]
        order, pages, state = AxisOrder.TOKENS_FIRST, PAGES.shard(0, 1), STATE.shard(0, 1)
        self.cache = HostCache.open(
            config(store),
            {
                KV_POOL: EnginePages(pages, {"k": self.kv}, order),
                "window": EnginePages(pages, {"k": self.window}, order),
                "state": EnginePages(state, {"ssm": self.state}, order),
            },
            InProcessGroup(1).member(0),
        )

    def step(self) -> None:
        self.cache.begin_step()
        self.cache.begin_loads()
        self.cache.begin_backups()
        self.cache.end_step(idle_s=1.0)

    def until(self, request: str, state: LoadState) -> None:
        for _ in range(200):
            self.step()
            if self.cache.load_state(request) is state:
                return
        pytest.fail(f"{request} is {self.cache.load_state(request)}")

    def until_idle(self) -> None:
        for _ in range(200):
            self.step()
            if self.cache.inspection.idle:
                return
        pytest.fail("operations are still in flight after 200 steps")

    def content(self, kv: list[int], window: list[int], slot: int) -> list[torch.Tensor]:
        """Return copies of some full-attention pages, some window pages and one state slot."""
        parts = [each[kv].clone() for each in self.kv]
        parts += [each[window].clone() for each in self.window]
        return [*parts, *(each[[slot]].clone() for each in self.state)]


@contextmanager
def running(store: Path) -> Generator[Engine]:
    made = Engine(store)
    try:
        yield made
    finally:
        made.cache.close(flush=False)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with running(tmp_path) as made:
        yield made


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def lent(kv: list[int], window: list[int], state: list[int]) -> dict[str, list[int]]:
    return {KV_POOL: kv, "window": window, "state": state}


def test_what_was_backed_up_is_loaded_into_other_pages_of_every_pool(engine: Engine) -> None:
    written = engine.content([0, 1, 2, 3, 4, 5], [4, 5], 1)
    gone = [NO_PAGE] * 4
    engine.cache.back_up("w", PROMPT, lent([0, 1, 2, 3, 4, 5], [*gone, 4, 5], [1]))
    engine.cache.flush()
    engine.cache.release("w")

    assert engine.cache.match_host("r", PROMPT) == len(PROMPT)
    engine.cache.load("r", PROMPT, lent([10, 11, 12, 13, 14, 15], [*gone, 16, 17], [3]))
    engine.until("r", LoadState.READY)

    assert_equal(engine.content([10, 11, 12, 13, 14, 15], [16, 17], 3), written)


def test_what_storage_has_of_every_pool_is_found_by_an_engine_that_begins_anew(
    engine: Engine, tmp_path: Path
) -> None:
    written = engine.content([0, 1, 2, 3, 4, 5], [4, 5], 1)
    engine.cache.back_up("w", PROMPT, lent(list(range(6)), list(range(6)), [1]))
    engine.cache.flush()
    engine.cache.close()

    with running(tmp_path) as other:
        assert other.cache.prefetch("r", PROMPT)
        other.until_idle()
        assert other.cache.match_host("r", PROMPT) == len(PROMPT)
        other.cache.load("r", PROMPT, lent(list(range(6)), [*[NO_PAGE] * 4, 8, 9], [0]))
        other.until("r", LoadState.READY)

        assert_equal(other.content(list(range(6)), [8, 9], 0), written)


def test_a_retracted_request_comes_back_with_its_last_page_and_its_state(engine: Engine) -> None:
    """Incident E, with engine-owned pages: a resumed request gets the bytes that were retracted."""
    tokens = [*PROMPT, 7, 8]
    held = engine.content([0, 1, 2, 3, 4, 5, 6], [4, 5, 6], 2)
    gone = [NO_PAGE] * 4
    engine.cache.match_host("r", tokens)
    assert engine.cache.retract("r", tokens, lent([0, 1, 2, 3, 4, 5, 6], [*gone, 4, 5, 6], [2]))
    engine.until("r", LoadState.SAVED)
    assert not engine.cache.has_copies_in_flight("r")
    for each in (*engine.kv, *engine.window, *engine.state):
        each.zero_()

    back = [23, 22, 21, 20, 19, 18, 17]
    assert engine.cache.resume("r", lent(back, [*gone, 3, 2, 1], [5])) is None
    engine.until("r", LoadState.READY)

    assert_equal(engine.content(back, [3, 2, 1], 5), held)
