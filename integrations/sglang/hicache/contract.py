"""What the storage under HiCache uses of SGLang's objects, as of SGLang 0.5.23, and nothing else.

The classes that it derives from or makes are imported where they are used, in `storage`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

BufferMeta = tuple[Sequence[int], Sequence[int]]
"""Addresses, and bytes at each: the same number of pieces for every page, page after page."""


class StorageConfig(Protocol):
    """`hicache_storage.HiCacheStorageConfig`: where this rank stands, and what the user wrote."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    """Every rank of the TP group holds the same bytes of the main pool."""
    enable_storage_metrics: bool
    model_name: str | None
    tp_lcm_size: int | None
    extra_config: dict[str, Any] | None
    dcp_size: int


class HostPool(Protocol):
    """`pool_host.base.HostKVCache` and what stands in for it: pages in host memory.

    Indices are slots; a page has `page_size` of them, and is named by its first.
    """

    page_size: int
    layout: str
    dtype: torch.dtype

    def get_page_buffer_meta(self, indices: torch.Tensor) -> BufferMeta | None:
        """Say where the bytes of pages lie; None where a pool has none, an error where it cannot."""
        ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return the page's bytes as one tensor, which is a copy or a view."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a tensor of the type and length that flat pages have."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Overwrite the page."""
        ...


class Transfer(Protocol):
    """`hicache_storage.PoolTransfer`: pages of one pool, each with a key and slots. Read only.

    `hit_policy` says which of them a restorable prefix needs. Of BLOCK_GROUPS, a block covers so many
    pages of the main pool, and has so many keys.
    """

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> Sequence[str] | None: ...

    @property
    def host_indices(self) -> torch.Tensor | None: ...

    @property
    def hit_policy(self) -> str: ...

    @property
    def block_pages(self) -> int: ...

    @property
    def group_pages(self) -> int: ...


EngineFacts = Mapping[str, str]
"""What else changes the values in pages, by the name of the engine's argument."""
