"""Retract and resume with real memory restore the same bytes in every pool (incident E)."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lockstep import Cache, CacheConfig, Column, PageLayout
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import UsageError
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.protocol.answers import Admission, Wait
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.tree.node import DEVICE

PAGE_TOKENS = 4
KV = PageLayout(
    page_tokens=PAGE_TOKENS,
    columns=(
        Column(name="k", layers=2, heads=2, elements=4, dtype="float32"),
        Column(name="index", layers=2, heads=1, elements=2, dtype="float32", replicated=True),
    ),
)
STATE = PageLayout(
    page_tokens=1, columns=(Column(name="ssm", layers=2, heads=2, elements=16, dtype="float32"),)
)
POOLS = (KV_POOL, "window", "state")
TOKENS = np.arange(19, dtype=np.int32)
"""Tokens of four whole pages, and three tokens of a fifth."""


@pytest.fixture
def cache() -> Iterator[Cache]:
    config = CacheConfig(
        model="m",
        layout=KV,
        components=(
            SlidingWindow(window_tokens=6, layout=KV, device_pages=16, host_pages=16),
            Recurrent(checkpoint_tokens=8, layout=STATE, device_pages=8, host_pages=8),
        ),
        device_pages=16,
        host_pages=16,
        pipeline_depth=0,
    )
    opened = Cache.open(config, InProcessGroup(1).member(0))
    yield opened
    opened.close(flush=False)


def settle(cache: Cache) -> None:
    assert cache.flush()


def pages(cache: Cache, request: str) -> dict[str, list[int]]:
    return {
        pool: [page for page in cache.page_table(request, pool).tolist() if page >= 0]
        for pool in POOLS
    }


def contents(cache: Cache, request: str) -> list[torch.Tensor]:
    held: list[torch.Tensor] = []
    for pool, table in pages(cache, request).items():
        columns = STATE.columns if pool == "state" else KV.columns
        device = cache.device_pools[pool]
        held += [device.column(column.name)[:, table].clone() for column in columns]
    return held


def compute(cache: Cache, request: str, tokens: np.ndarray) -> None:
    """Admit a request and compute all its tokens: fill its pages with random content."""
    admission = cache.load_back(request, tokens[:-1], reserve_tokens=len(tokens))
    assert isinstance(admission, Admission)
    for pool, table in pages(cache, request).items():
        columns = STATE.columns if pool == "state" else KV.columns
        for column in columns:
            tensor = cache.device_pools[pool].column(column.name)
            tensor[:, table] = torch.rand_like(tensor[:, table])


def spoil_the_device(cache: Cache, who: str) -> None:
    """Let another request fill the whole device, so that a stale read of old pages is detected."""
    admission = cache.load_back(who, [], reserve_tokens=16 * PAGE_TOKENS)
    assert isinstance(admission, Admission)
    for pool in POOLS:
        for column in STATE.columns if pool == "state" else KV.columns:
            cache.device_pools[pool].column(column.name).fill_(-1.0)


def test_a_retracted_request_comes_back_with_the_bytes_of_every_pool(cache: Cache) -> None:
    """Incident E: another request's data was served after a retract.

    The index pool was not saved with the KV, and the saved values were views of reused slots.
    """
    compute(cache, "a", TOKENS)
    assert cache.insert("a", TOKENS, final=False) == 16
    before = contents(cache, "a")

    assert cache.retract("a", TOKENS)
    assert cache.load_state("a") is LoadState.SAVING
    settle(cache)
    assert cache.load_state("a") is LoadState.SAVED
    spoil_the_device(cache, "b")
    cache.release("b")
    admission = cache.resume("a", reserve_tokens=24)
    assert isinstance(admission, Admission)
    assert admission.cached_tokens == len(TOKENS)
    settle(cache)

    assert cache.load_state("a") is LoadState.READY
    # Compare only the pages filled before the retract; newly reserved pages follow them.
    pairs = zip(before, contents(cache, "a"), strict=True)
    assert all(torch.equal(was, now[:, : was.shape[1]]) for was, now in pairs)
    cache.inspection.check()


def test_a_retracted_request_holds_nothing_on_the_device(cache: Cache) -> None:
    compute(cache, "a", TOKENS)
    cache.retract("a", TOKENS)
    settle(cache)

    allocator = cache.inspection.prefixes.allocator
    assert [allocator.available(DEVICE, component) for component in range(3)] == [16, 16, 8]


def test_a_resume_waits_for_room_and_loses_nothing(cache: Cache) -> None:
    compute(cache, "a", TOKENS)
    cache.insert("a", TOKENS, final=False)
    before = contents(cache, "a")
    cache.retract("a", TOKENS)
    settle(cache)
    spoil_the_device(cache, "b")

    assert cache.resume("a") is Wait.NO_ROOM
    assert cache.load_state("a") is LoadState.SAVED
    cache.release("b")
    assert isinstance(cache.resume("a"), Admission)
    settle(cache)

    assert all(torch.equal(*each) for each in zip(before, contents(cache, "a"), strict=True))


def test_bytes_that_are_not_what_was_saved_fail_the_resume(cache: Cache) -> None:
    """A resume verifies the saved bytes, and fails if they have changed."""
    compute(cache, "a", TOKENS)
    cache.retract("a", TOKENS)
    settle(cache)
    assert isinstance(cache.inspection.executor, RankExecutor)
    saved = cache.inspection.requests.known("a").saved
    assert saved is not None
    (slot,) = saved[2]
    cache.inspection.executor.host_pools["state"].bytes_tensor[slot, 5] += 1

    assert isinstance(cache.resume("a"), Admission)
    settle(cache)

    assert cache.load_state("a") is LoadState.FAILED
    again = cache.load_back("a", TOKENS[:-1], reserve_tokens=len(TOKENS))
    assert isinstance(again, Admission)
    cache.release("a")
    settle(cache)
    cache.inspection.check()


def test_only_a_retracted_request_can_be_resumed(cache: Cache) -> None:
    compute(cache, "a", TOKENS)

    with pytest.raises(UsageError, match="is not retracted"):
        cache.resume("a")
    with pytest.raises(UsageError, match="has filled 6 pages and reserved 5"):
        cache.retract("a", np.arange(21, dtype=np.int32))


def test_a_request_that_has_computed_nothing_can_be_retracted_and_resumed(cache: Cache) -> None:
    """A request without tokens can be retracted and resumed, and leaves no pin on the empty tree."""
    cache.load_back("a", [], reserve_tokens=8)
    assert cache.retract("a", [])
    settle(cache)
    assert isinstance(cache.resume("a"), Admission)
    cache.release("a")
    cache.inspection.check()
    settle(cache)
    cache.inspection.check()
