"""Host pools with HiCache's memory layouts in plain torch, and the TP, PP and CP position of a rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.integrations.sglang.hicache.calls import HiCacheCalls
from lockstep.integrations.sglang.hicache.contract import BufferMeta

LAYERS, HEADS, DIM = 3, 2, 4
PAGE_SIZE = 4
PAGES = 8


class PageFirst:
    """A host pool of shape [2, slots, layers, heads, dim]: a page is two contiguous pieces."""

    layout = "page_first"

    def __init__(self, page_size: int = PAGE_SIZE, dtype: torch.dtype = torch.float32) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self.kv = self._made(PAGES * page_size)

    def _made(self, slots: int) -> torch.Tensor:
        return torch.zeros((2, slots, LAYERS, HEADS, DIM), dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> BufferMeta | None:
        slots = [int(each) for each in indices[:: self.page_size]]
        places = [half[slot] for slot in slots for half in self.kv]
        nbytes = self.page_size * places[0].nbytes
        return [place.data_ptr() for place in places], [nbytes] * len(places)

    def page(self, index: int) -> torch.Tensor:
        """Return a view of the page that begins at a slot."""
        return self.kv[:, index : index + self.page_size]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.page(index).flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.page(0).flatten())

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.page(index)
        page.copy_(data_page.reshape(page.shape))


class LayerFirst(PageFirst):
    """A host pool of shape [2, layers, slots, heads, dim]: a page has two pieces in each layer."""

    layout = "layer_first"

    def _made(self, slots: int) -> torch.Tensor:
        return torch.zeros((2, LAYERS, slots, HEADS, DIM), dtype=self.dtype)

    def page(self, index: int) -> torch.Tensor:
        return self.kv[:, :, index : index + self.page_size]


class Anchor(PageFirst):
    """A host pool that stores no bytes, but defines the page numbers that all other pools share."""

    layout = "layer_first"

    def get_page_buffer_meta(self, indices: torch.Tensor) -> BufferMeta | None:
        return None

    def page(self, index: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


@dataclass(kw_only=True)
class Standing:
    """A rank's TP, PP and CP position in its group, and the user's extra configuration."""

    tp_rank: int = 0
    tp_size: int = 2
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "a model"
    tp_lcm_size: int | None = None
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1


@dataclass(frozen=True)
class Wanted:
    """A storage call's transfer for one pool, with the fields of SGLang's class."""

    name: str
    keys: Sequence[str] | None = None
    hit_policy: str = "all_pages"
    block_pages: int = 0
    group_pages: int = 0
    host_indices: torch.Tensor | None = field(default=None, compare=False)


def keys_of(count: int, start: int = 0) -> list[str]:
    """Return keys in SGLang's format: 64 hexadecimal digits."""
    return [f"{number:064x}" for number in range(start, start + count)]


def slots_of(pool: PageFirst, *pages: int) -> torch.Tensor:
    return torch.cat(
        [torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages]
    )


def filled(pool: PageFirst, seed: int = 1) -> PageFirst:
    """Fill a host pool with random bytes and return it."""
    drawn = torch.randint(0, 256, (pool.kv.nbytes,), generator=torch.Generator().manual_seed(seed))
    pool.kv.view(torch.uint8).copy_(drawn.to(torch.uint8).reshape(pool.kv.view(torch.uint8).shape))
    return pool


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes, NaNs included."""
    return one.contiguous().view(torch.uint8).equal(two.contiguous().view(torch.uint8))


def opened(
    store: str,
    pool: PageFirst,
    standing: Standing | None = None,
    facts: Mapping[str, str] | None = None,
    **extra: Any,
) -> HiCacheCalls:
    stands = standing or Standing()
    stands.extra_config = {"store": store, **extra}
    calls = HiCacheCalls(stands, facts or {})
    calls.open(pool)
    return calls
