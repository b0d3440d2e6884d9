"""Pages moved about on the device: gathered into page-first memory and back, or to another page.

Host pages are page-first and device columns are layer-first, so copying a page directly would take
one small transfer for each layer. Gathered on the device first, where memory is fast, it takes one
transfer, and neighbouring host pages share it. Nothing here knows about streams: the work is put on
the current one.
"""

from collections.abc import Iterator

import torch

from ..page_layout import ColumnShard
from .pools import TierPools

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""What bytes are moved as, the widest first: fewer, wider accesses, and no arithmetic on them."""


def gather(pools: TierPools, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy device pages to the rows of `staging`: row i gets page `pages[i]`.

    `pages` is int64 [n], `staging` uint8 [n, page_bytes], contiguous; both on the pool's device.
    """
    for shard in pools.layout.columns:
        for slab, rows in _words(pools, shard, staging):
            torch.index_select(slab.transpose(0, 1), 0, pages, out=rows)


def scatter(pools: TierPools, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy the rows of `staging` to device pages: page `pages[i]` gets row i. As for `gather`."""
    for shard in pools.layout.columns:
        for slab, rows in _words(pools, shard, staging):
            slab.index_copy_(1, pages, rows.transpose(0, 1))


def fork_page(pools: TierPools, source: int, destination: int) -> None:
    """Copy one device page to another, all columns and layers."""
    for shard in pools.layout.columns:
        word = _word(shard.unit_layer_bytes)
        for slab in pools.device.slabs(shard):
            pages = slab.view(word)
            pages[:, destination].copy_(pages[:, source])


def host_rows(
    pages: torch.Tensor, shard: ColumnShard, word: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Return a view [layers, pages, units, words] of a column in host pages; no copy.

    `pages` is uint8 [pages, page_bytes] and contiguous.
    """
    words = pages.view(word)
    size = word.itemsize
    return words.as_strided(
        (shard.layers, len(pages), shard.units, shard.unit_layer_bytes // size),
        (
            shard.unit_layer_bytes // size,
            words.stride(0),
            shard.stride_bytes // size,
            1,
        ),
        words.storage_offset() + shard.offset_bytes // size,
    )


def _words(
    pools: TierPools, shard: ColumnShard, staging: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of views, one for each slab of a column.

    They are [layers, pages, units, words] of the slab and [n, layers, units, words] of `staging`.
    """
    places = (shard.unit_layer_bytes, shard.stride_bytes, shard.offset_bytes)
    word = _word(*places, pools.layout.page_bytes)
    rows = host_rows(staging, shard, word).transpose(0, 1)
    layer = 0
    for slab in pools.device.slabs(shard):
        layers, pages, _ = slab.shape
        column = slab.view(word).view(layers, pages, *rows.shape[2:])
        yield column, rows[:, layer : layer + layers]
        layer += layers


def _word(*places: int) -> torch.dtype:
    return next(word for word in _WORDS if not any(place % word.itemsize for place in places))
