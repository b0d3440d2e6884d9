"""SGLang's pools as pages: what one TP size has written is what another one reads, byte for byte."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.coordinator.collective import Collective
from lockstep.errors import ConfigError
from lockstep.integrations.sglang.pools.engine_layout import EnginePool, engine_pools
from lockstep.ranks.executor.engine_pages import AxisOrder
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import CacheConfig, SlidingWindow
from lockstep.ranks.protocol.orders import KV_POOL
from tests.kit.ranks.as_threads import RanksAsThreads

TOKENS, PAGES, LAYERS, HEADS, KEY_DIM, VALUE_DIM = 4, 6, 2, 4, 8, 6
PROMPT = list(range(3 * TOKENS))
SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "nhd": lambda heads, elements: (PAGES * TOKENS, heads, elements),
    "hnd": lambda heads, elements: (PAGES, heads, TOKENS, elements),
}


@dataclass
class MHATokenToKVPool:
    """SGLang's pool of full attention: one tensor for each layer, of keys and of values."""

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    layout: str = "nhd"
    page_size: int = TOKENS
    scales: object | None = None
    head_num: int = HEADS
    dtype: torch.dtype = torch.bfloat16

    @property
    def layer_num(self) -> int:
        return len(self.k)

    def get_device_pool_infos(self) -> list[Any]:
        buffers = SimpleNamespace(k=self.k, v=self.v, layout=SimpleNamespace(value=self.layout))
        info = SimpleNamespace(
            buffers=buffers,
            page_size=self.page_size,
            head_num=self.head_num,
            head_dim=KEY_DIM,
            v_head_dim=VALUE_DIM,
            dtype=self.dtype,
            scales=self.scales,
        )
        return [SimpleNamespace(buffer_info=info)]


class MHATokenToKVPoolFP4(MHATokenToKVPool):
    """A pool of another class, though derived from that one."""


@dataclass
class SWAKVPool:
    """SGLang's two pools of a model with sliding windows."""

    full_kv_pool: MHATokenToKVPool
    swa_kv_pool: MHATokenToKVPool


def pool(layout: str = "nhd", heads: int = HEADS, **other: Any) -> MHATokenToKVPool:
    """Return a pool with random content, of so many heads on this rank."""
    sides = [
        [torch.rand(SHAPES[layout](heads, elements)).to(torch.bfloat16) for _ in range(LAYERS)]
        for elements in (KEY_DIM, VALUE_DIM)
    ]
    return MHATokenToKVPool(sides[0], sides[1], layout, head_num=heads, **other)


def by_token(pool: MHATokenToKVPool, page: int) -> list[torch.Tensor]:
    """Return what a page holds, layer by layer, as [tokens, heads, elements]."""
    if pool.layout == "nhd":
        return [each[page * TOKENS : (page + 1) * TOKENS] for each in (*pool.k, *pool.v)]
    return [each[page].transpose(0, 1) for each in (*pool.k, *pool.v)]


@pytest.mark.parametrize(
    ("layout", "order"), [("nhd", AxisOrder.TOKENS_FIRST), ("hnd", AxisOrder.HEADS_FIRST)]
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_pool_is_described_in_units_of_the_whole_model(
    layout: str, order: AxisOrder, tp_size: int
) -> None:
    [(name, found)] = engine_pools(pool(layout, HEADS // tp_size), TOKENS, tp_size).items()

    assert (name, found.order, found.device_pages) == (KV_POOL, order, PAGES)
    assert found.layout.page_tokens == TOKENS
    assert [
        (each.name, each.layers, each.heads, each.elements, each.dtype)
        for each in found.layout.columns
    ] == [
        ("k", LAYERS, HEADS, KEY_DIM, "bfloat16"),
        ("v", LAYERS, HEADS, VALUE_DIM, "bfloat16"),
    ]


def test_nothing_is_copied_to_see_the_pages_of_tensors_with_any_strides() -> None:
    made = pool()
    wide = torch.rand(PAGES * TOKENS, HEADS, 2 * KEY_DIM).to(torch.bfloat16)
    made.k = [wide[..., :KEY_DIM], wide[..., KEY_DIM:]]

    found = engine_pools(made, TOKENS, 1)[KV_POOL].tensors["k"]

    assert [each.shape for each in found] == [(PAGES, TOKENS, HEADS, KEY_DIM)] * 2
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in made.k]


def test_where_there_are_more_ranks_than_heads_each_copy_counts() -> None:
    found = engine_pools(pool(heads=1), TOKENS, 8)[KV_POOL]

    assert {each.heads for each in found.layout.columns} == {8}


def test_a_model_with_windows_has_two_pools() -> None:
    found = engine_pools(SWAKVPool(pool(), pool()), TOKENS, 1)

    assert list(found) == [KV_POOL, "window"]


def another_layout() -> MHATokenToKVPool:
    made = pool()
    made.layout = "packed"
    return made


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "another class": (
        lambda: MHATokenToKVPoolFP4([], []),
        "in a MHATokenToKVPoolFP4, and Lockstep serves MHATokenToKVPool,",
    ),
    "scales": (lambda: pool(scales=object()), "scales beside its KV"),
    "another size of pages": (lambda: pool(page_size=1), "pages of 1 tokens; Lockstep serves nhd"),
    "another layout": (another_layout, "layout 'packed', no scales"),
    "windows in another class": (
        lambda: SWAKVPool(pool(), MHATokenToKVPoolFP4([], [])),
        "windows are beside a MHATokenToKVPoolFP4 of 0 layers",
    ),
    "windows alone": (
        lambda: SWAKVPool(MHATokenToKVPool([], []), pool()),
        "beside a MHATokenToKVPool of 0 layers",
    ),
    "another type": (lambda: pool(dtype=torch.float64), "float64"),
}


@pytest.mark.parametrize(("made", "named"), REFUSED.values(), ids=REFUSED)
def test_a_pool_that_lockstep_does_not_serve_is_refused_by_what_it_is(
    made: Callable[[], object], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        engine_pools(made(), TOKENS, 1)

    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def opened(
    pools: dict[str, EnginePool], member: Collective, world_size: int, store: Path
) -> HostCache:
    """Open a cache under an engine's pools on one rank."""
    windows = [
        SlidingWindow(
            window_tokens=2 * TOKENS, layout=each.layout, device_pages=0, host_pages=PAGES
        )
        for name, each in pools.items()
        if name == "window"
    ]
    config = CacheConfig(
        model="m",
        layout=pools[KV_POOL].layout,
        components=tuple(windows),
        host_pages=PAGES,
        store=f"file://{store}?durability=none",
        populate_host=False,
    )
    lent = {name: each.lend(member.rank, world_size) for name, each in pools.items()}
    return HostCache.open(config, lent, member)


def write(store: Path, kvs: Sequence[object], device_pages: Any) -> None:
    """Let one rank for each of the pools back up the prompt, which lies in so many device pages."""

    def program(member: Collective, hold: Callable[[], None]) -> None:
        pools = engine_pools(kvs[member.rank], TOKENS, len(kvs))
        host = opened(pools, member, len(kvs), store)
        assert host.back_up("w", PROMPT, device_pages) == len(PROMPT)
        host.flush()
        host.close()

    RanksAsThreads().run(program, len(kvs))


def read(store: Path, kvs: Sequence[object], device_pages: Any) -> None:
    """Let one rank for each of the pools load the prompt from the store to such device pages."""

    def program(member: Collective, hold: Callable[[], None]) -> None:
        pools = engine_pools(kvs[member.rank], TOKENS, len(kvs))
        host = opened(pools, member, len(kvs), store)
        assert host.prefetch("r", PROMPT)
        host.flush()
        assert host.hit("r", PROMPT) == len(PROMPT)
        host.load("r", PROMPT, device_pages)
        host.flush()
        host.close()

    RanksAsThreads().run(program, len(kvs))


def whole(parts: Sequence[MHATokenToKVPool], page: int) -> list[torch.Tensor]:
    """Return what a page holds over all ranks, by layer, as [tokens, heads, elements]."""
    ranks = [by_token(each, page) for each in parts]
    return [torch.cat(each, dim=1) for each in zip(*ranks, strict=True)]


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("writes", "reads"), [("nhd", "nhd"), ("nhd", "hnd"), ("hnd", "nhd"), ("hnd", "hnd")]
)
@pytest.mark.parametrize(("from_tp", "to_tp"), [(2, 1), (1, 2), (4, 2)])
def test_what_one_tp_size_wrote_another_reads_whatever_the_order_of_the_axes(
    tmp_path: Path, writes: str, reads: str, from_tp: int, to_tp: int
) -> None:
    writers = [pool(writes, HEADS // from_tp) for _ in range(from_tp)]
    readers = [pool(reads, HEADS // to_tp) for _ in range(to_tp)]

    write(tmp_path, writers, [5, 0, 3])
    read(tmp_path, readers, [1, 2, 4])

    assert equal(whole(readers, 1), whole(writers, 5))
    assert equal(whole(readers, 2), whole(writers, 0))
    assert equal(whole(readers, 4), whole(writers, 3))


def test_windows_come_back_to_their_own_pool_and_only_as_far_as_they_reach(tmp_path: Path) -> None:
    writers = [SWAKVPool(pool(heads=2), pool(heads=2)) for _ in range(2)]
    reader = SWAKVPool(pool(), pool())
    untouched = [each.clone() for each in by_token(reader.swa_kv_pool, 0)]

    write(tmp_path, writers, {KV_POOL: [0, 1, 2], "window": [3, 4, 5]})
    read(tmp_path, [reader], {KV_POOL: [3, 4, 5], "window": [-1, 1, 2]})

    full, window = [each.full_kv_pool for each in writers], [each.swa_kv_pool for each in writers]
    for at in range(3):
        check(reader.full_kv_pool, 3 + at, whole(full, at))
    for at in (1, 2):
        check(reader.swa_kv_pool, at, whole(window, 3 + at))
    assert equal(by_token(reader.swa_kv_pool, 0), untouched)


def check(found: MHATokenToKVPool, page: int, wanted: Sequence[torch.Tensor]) -> None:
    """Check what a page holds."""
    assert equal(by_token(found, page), wanted)
