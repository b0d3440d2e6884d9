"""Protocols for the SGLang objects that the HiCache storage uses, as of SGLang 0.5.23.

Classes that the storage derives from or creates are imported in `storage.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

BufferMeta = tuple[Sequence[int], Sequence[int]]
"""(addresses, byte counts) of the pieces of a list of pages. Every page has the same number of pieces.
"""


class StorageConfig(Protocol):
    """`hicache_storage.HiCacheStorageConfig`: this rank's position in parallel groups, and settings."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    """Whether every rank of the TP group holds the same bytes of the main pool (MLA)."""
    enable_storage_metrics: bool
    model_name: str | None
    tp_lcm_size: int | None
    extra_config: dict[str, Any] | None
    dcp_size: int


class HicacheHostPool(Protocol):
    """`pool_host.base.HostKVCache` or an equivalent: HiCache's pages in host memory.

    Indices are slot numbers. A page has `page_size` slots and is identified by its first slot.
    """

    page_size: int
    layout: str
    dtype: torch.dtype

    def get_page_buffer_meta(self, indices: torch.Tensor) -> BufferMeta | None:
        """Return the addresses of the pages; return None or raise if the pool cannot report them."""
        ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return the page's bytes as one tensor, either a copy or a view."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a tensor with the dtype and length of one page; its values are undefined."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Overwrite the page at slot `index` with `data_page`."""
        ...


class HicacheTransfer(Protocol):
    """`hicache_storage.PoolTransfer`: pages of one pool, each with a key and slots; not changed here.

    `hit_policy` determines which of its pages this pool must have so that a prefix can be restored.
    With the policy `block_groups`, the pool stores each block of `block_pages` main-pool pages under
    `group_pages` keys.
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
"""Maps argument names of SGLang to values, for arguments that change page contents but not the page
layout."""
