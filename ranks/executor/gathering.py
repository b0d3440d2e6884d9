"""Pages moved about on the device: gathered into page-first memory and back, or to another page.

Host pages are page-first and device columns are layer-first, so copying a page directly would take
one small transfer for each layer. Gathered on the device first, where memory is fast, it takes one
transfer, and neighbouring host pages share it. Nothing here knows about streams: the work is put on
the current one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...page_format.page_layout import ColumnShard
from .pools import TierPools

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types that bytes are moved as, the widest first. Integers, since nothing is computed with them."""


@dataclass(frozen=True, slots=True)
class SlabPair:
    """Some layers of a column: where they are on the device, and where host pages have them."""

    device: torch.Tensor
    """[layers, pages, ...]: the axes of a page in the page's order, whatever order they lie in, in the
    widest words that both sides allow."""
    steps: tuple[int, ...]
    """The strides of the same axes in host pages, without that of the pages."""
    offset: int
    """Where host pages have the first word."""

    def rows(self, pages: torch.Tensor) -> torch.Tensor:
        """Return host pages as a view like `device`; uint8 [pages, page_bytes], contiguous."""
        words = pages.view(self.device.dtype)
        layers, _, *sizes = self.device.shape
        return words.as_strided(
            (layers, len(words), *sizes),
            (self.steps[0], words.stride(0), *self.steps[1:]),
            int(words.storage_offset()) + self.offset,
        )


def slab_pairs(pools: TierPools) -> list[SlabPair]:
    """Return all that a page consists of, column by column."""
    pairs: list[SlabPair] = []
    with torch.inference_mode(mode=False):
        for shard in pools.layout.columns:
            offset = shard.offset_bytes
            for slab in pools.device.slabs(shard):
                pairs.append(_pair(slab, shard, offset, pools.layout.page_bytes))
                offset += len(slab) * shard.unit_layer_bytes
    return pairs


def gather(pairs: Iterable[SlabPair], pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy device pages to the rows of `staging`: row i gets page `pages[i]`.

    `pages` is int64 [n], `staging` uint8 [n, page_bytes], contiguous; both on the pool's device.
    """
    for pair in pairs:
        rows = pair.rows(staging).transpose(0, 1)
        torch.index_select(pair.device.transpose(0, 1), 0, pages, out=rows)


def scatter(pairs: Iterable[SlabPair], pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy the rows of `staging` to device pages: page `pages[i]` gets row i. As for `gather`."""
    for pair in pairs:
        pair.device.index_copy_(1, pages, pair.rows(staging))


def fork_page(pairs: Iterable[SlabPair], source: int, destination: int) -> None:
    """Copy one device page to another, all columns and layers."""
    for pair in pairs:
        pair.device[:, destination].copy_(pair.device[:, source])


def _pair(slab: torch.Tensor, shard: ColumnShard, offset: int, page_bytes: int) -> SlabPair:
    units = slab.view(*slab.shape[:2], shard.units, shard.heads // shard.units, *slab.shape[3:])
    within = [1]
    for size in reversed(units.shape[4:]):
        within.append(within[-1] * size)
    on_host = (shard.stride_bytes, *reversed(within))
    axes = _joined(list(zip(units.shape[2:], units.stride()[2:], on_host, strict=True)))
    sizes, device_steps, host_steps = zip(*axes, strict=True)
    strides = (*slab.stride()[:2], *device_steps)
    steps = (shard.unit_layer_bytes, *host_steps)
    places = (sizes[-1], *strides[:-1], slab.storage_offset(), *steps[:-1], offset, page_bytes)
    word = next(word for word in _WORDS if not any(place % word.itemsize for place in places))
    device = slab.as_strided((*slab.shape[:2], *sizes), strides, slab.storage_offset())
    words = tuple(step // word.itemsize for step in steps[:-1])
    return SlabPair(device.view(word), (*words, 1), offset // word.itemsize)


def _joined(axes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the fewest axes (size, stride, other stride) that describe the same bytes on both sides.

    Fewer axes make a call cheaper, which shows on small pages, and longer runs of bytes.
    """
    joined: list[tuple[int, int, int]] = []
    for at, (size, step, other) in enumerate(axes):
        if joined and joined[-1][1:] == (step * size, other * size):
            joined[-1] = (joined[-1][0] * size, step, other)
        elif size > 1 or at == len(axes) - 1:
            joined.append((size, step, other))
    return joined
