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
        page_layer_bytes = shard.nbytes // shard.column.layers
        word = next(word for word in _WORDS if not page_layer_bytes % word.itemsize)
        for slab in pools.device.slabs(shard):
            pages = slab.view(word)
            pages[:, destination].copy_(pages[:, source])


def _words(
    pools: TierPools, shard: ColumnShard, staging: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views [layers, pages, words] of the column and [n, layers, words] of its staging."""
    page_layer_bytes = shard.nbytes // shard.column.layers
    places = (page_layer_bytes, shard.offset_bytes, pools.layout.page_bytes)
    word = next(word for word in _WORDS if not any(place % word.itemsize for place in places))
    part = staging[:, shard.offset_bytes : shard.offset_bytes + shard.nbytes].view(word)
    rows = part.view(len(staging), shard.column.layers, -1)
    layer = 0
    for slab in pools.device.slabs(shard):
        yield slab.view(word), rows[:, layer : layer + len(slab)]
        layer += len(slab)
