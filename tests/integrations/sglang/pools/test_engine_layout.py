"""SGLang's pools as pages: the columns and tensors of each pool, and unsupported pools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.pools.engine_layout import engine_pools
from lockstep.ranks.executor.engine_pages import AxisOrder
from lockstep.ranks.protocol.orders import KV_POOL

TOKENS, PAGES, LAYERS, HEADS, KEY_DIM, VALUE_DIM = 4, 6, 2, 4, 8, 6
SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "nhd": lambda heads, elements: (PAGES * TOKENS, heads, elements),
    "hnd": lambda heads, elements: (PAGES, heads, TOKENS, elements),
}


@dataclass
class MHATokenToKVPool:
    """Stand-in for SGLang's pool of full attention: per layer one tensor of keys and one of values."""

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
    """A class that Lockstep does not support, although it is derived from a supported pool class."""


@dataclass
class SWAKVPool:
    """Stand-in for SGLang's two pools of a model with sliding windows."""

    full_kv_pool: MHATokenToKVPool
    swa_kv_pool: MHATokenToKVPool


def pool(layout: str = "nhd", heads: int = HEADS, **other: Any) -> MHATokenToKVPool:
    sides = [
        [torch.rand(SHAPES[layout](heads, elements)).to(torch.bfloat16) for _ in range(LAYERS)]
        for elements in (KEY_DIM, VALUE_DIM)
    ]
    return MHATokenToKVPool(sides[0], sides[1], layout, head_num=heads, **other)


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
    full, windows = pool(), pool()

    found = engine_pools(SWAKVPool(full, windows), TOKENS, 1)

    assert {name: each.tensors["v"][1].data_ptr() for name, each in found.items()} == {
        KV_POOL: full.v[1].data_ptr(),
        "window": windows.v[1].data_ptr(),
    }


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "another class": (
        lambda: MHATokenToKVPoolFP4([], []),
        "in a MHATokenToKVPoolFP4; Lockstep supports MHATokenToKVPool,",
    ),
    "scales": (lambda: pool(scales=object()), "separate scales"),
    "another size of pages": (
        lambda: pool(page_size=1),
        "pages of 1 tokens; Lockstep supports nhd",
    ),
    "another layout": (lambda: replace(pool(), layout="packed"), "layout 'packed', no scales"),
    "windows in another class": (
        lambda: SWAKVPool(pool(), MHATokenToKVPoolFP4([], [])),
        "windowed model has a MHATokenToKVPoolFP4 of 0 layers",
    ),
    "windows alone": (
        lambda: SWAKVPool(MHATokenToKVPool([], []), pool()),
        "has a MHATokenToKVPool of 0 layers",
    ),
}


@pytest.mark.parametrize(("made", "named"), REFUSED.values(), ids=REFUSED)
def test_a_pool_that_lockstep_does_not_serve_is_refused_by_what_it_is(
    made: Callable[[], object], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        engine_pools(made(), TOKENS, 1)

    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
