"""What HiCache lacks on a CPU: host memory that is not pinned, and copies that GPUs have kernels for.

For `hicache_io_backend="direct"` and the layouts `layer_first` and `page_first_direct`. Its tree, its
threads, its votes and its storage are its own.
"""

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens from slots to slots; each tensor is [tokens, heads, dim], one for each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens of all layers to the host.

    The sources are keys of all layers, then values; the two targets [pages, layers, page, heads, dim].
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = _pages(dst_indices, page_size)
    for number, source in enumerate(src_ptrs):
        rows = source[src_indices].view(len(pages), page_size, *source.shape[1:])
        dst_ptrs[number // layers][pages, number % layers] = rows


def transfer_kv_per_layer_direct_pf_lf(  # noqa: PLR0917 - HiCache calls it.
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer's tokens back from [pages, layers, page, heads, dim]."""
    pages = _pages(src_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def register() -> None:
    """Give HiCache's host pools what they lack; SGLang calls it in each of its processes."""
    pools: Any = import_module("sglang.srt.mem_cache.pool_host.mha")
    for copy in (
        transfer_kv_direct,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_per_layer_direct_pf_lf,
    ):
        setattr(pools, copy.__name__, copy)
    make = pools.HostKVCache.__init__

    @functools.wraps(make)
    def unpinned(pool: Any, *arguments: Any, **options: Any) -> None:
        make(pool, *arguments, **options | {"pin_memory": False})

    pools.HostKVCache.__init__ = unpinned


def _pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    return slots[::page_size] // page_size
