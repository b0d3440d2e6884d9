"""Pools of latent attention as pages, and pools refused by name."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.pools.engine_layout import SglangPool, engine_pools
from lockstep.ranks.protocol.orders import KV_POOL

PAGE, PAGES, LAYERS = 64, 3, 2


class Rows:
    def __init__(self, layers: Sequence[torch.Tensor], **others: Any) -> None:
        self.buffer_info = self
        self.buffers: object = tuple(layers)
        self.device_layer_num = LAYERS
        self.page_size = PAGE
        self.kv_cache_dim = 12
        self.dtype = torch.bfloat16
        self.scales: object = None
        for name, value in others.items():
            setattr(self, name, value)


class MLATokenToKVPool:
    """Stand-in for SGLang's pool of latent attention."""

    def __init__(self, **others: Any) -> None:
        layers = [torch.zeros(PAGES * PAGE, 1, 12, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.info = Rows(layers, **others)

    def get_device_pool_infos(self) -> tuple[Rows, ...]:
        return (self.info,)


class DSATokenToKVPool(MLATokenToKVPool):
    """Stand-in for SGLang's pool with an index; a layer may share the index of another layer."""

    index_page_size = PAGE

    def __init__(self, index_pages: Sequence[int], index_kpool: int = 1) -> None:
        super().__init__()
        self.index_kpool = index_kpool
        self.index_k_with_scale_buffer = [
            torch.zeros(pages, PAGE * 132, dtype=torch.uint8) for pages in index_pages
        ]


def described(pool: Any, tp_size: int = 1) -> SglangPool:
    return engine_pools(pool, PAGE, tp_size)[KV_POOL]


def test_latent_attention_is_one_page_for_all_ranks() -> None:
    pool = described(MLATokenToKVPool(), 2)

    shards = [pool.layout.shard(rank, 2) for rank in range(2)]
    [column] = pool.layout.columns
    assert (column.name, column.layers, column.heads, column.elements) == ("latent", LAYERS, 1, 12)
    assert [shard.replicated for shard in shards] == [True, True]
    assert shards[0] == shards[1] == described(MLATokenToKVPool()).layout.shard(0, 1)
    assert pool.device_pages == PAGES


@pytest.mark.parametrize(("index_pages", "layers"), [([PAGES, PAGES], 2), ([0, PAGES], 1)])
def test_an_index_is_a_column_of_the_page_for_each_layer_that_has_one(
    index_pages: list[int], layers: int
) -> None:
    pool = described(DSATokenToKVPool(index_pages))

    _, index = pool.layout.columns
    assert (index.name, index.layers, index.elements, index.dtype) == (
        "index",
        layers,
        132,
        "uint8",
    )
    assert index.replicated
    assert pool.lend(0, 1).pages == PAGES


def test_layers_that_all_lack_an_index_are_latent_attention_alone() -> None:
    assert described(DSATokenToKVPool([0, 0])).layout == described(MLATokenToKVPool()).layout


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (MLATokenToKVPool(scales=(torch.zeros(1),)), "separate scales"),
        (MLATokenToKVPool(buffers=object()), "several tensors for each layer"),
        (MLATokenToKVPool(page_size=1), "pages of 1 tokens"),
        (MLATokenToKVPool(device_layer_num=3), "2 of 3 layers on this rank"),
        (DSATokenToKVPool([PAGES, PAGES], index_kpool=4), "one index key for 4 tokens"),
    ],
)
def test_what_a_page_cannot_hold_is_refused_by_name(pool: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        described(pool)
