"""Access to the bytes of pages of a HiCache host pool: in place, or through temporary tensors.

- Pages are accessed in place if each consists of a few contiguous pieces (keys and values). This is so
  in the layouts `page_first`, `page_first_direct`, `page_first_kv_split` and `page_head`.
- Pages are copied through temporary tensors, a bounded number at a time, in the layout `layer_first`
  and in pools that do not report addresses of pages.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from ....errors import ConfigError
from .contract import HicacheHostPool

COPIED_AT_A_TIME: Final = 64 << 20
"""Maximum bytes of the temporary tensors of one store call, summed over its pages."""

_IN_PIECES: Final = ("page_first", "page_first_direct", "page_first_kv_split", "page_head")

Buffers = tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Consecutive pages of one read or write call; `first` is the first page's index in the call."""

    first: int
    buffers: list[Buffers]
    land: Callable[[int], None]
    """Function to call after a page was read from the store; its argument is the page's number in the
    batch. It copies the page from its temporary tensor to the pool, or does nothing if the page was
    read in place."""


class PoolPages:
    """Access to the pages of one HiCache host pool, with references that keep its memory alive."""

    def __init__(self, name: str, pool: HicacheHostPool) -> None:
        """Choose access in place or through temporary tensors; raise `ConfigError` if both fail."""
        self.name = name
        self.pool = pool
        self.page_slots = pool.page_size
        # Hold references to the pool's memory, because SGLang drops its pools while its threads still
        # write pages back.
        self.memory = _memory_of(pool)
        flat = pool.get_dummy_flat_data_page()
        self._flat_dtype, self._flat_length = flat.dtype, flat.numel()
        found = self._pieces_in_place(torch.arange(self.page_slots))
        self._is_in_place = found is not None
        if found is None:
            self._require_flat_pages()
            # Store at least one byte per page, because no object may be empty. In a pool whose pages
            # have no bytes, an object only records that its page exists.
            self.pieces = [max(1, self._flat_length * self._flat_dtype.itemsize)]
        else:
            self.pieces = [len(piece) for piece in found[0]]
        self.page_bytes = sum(self.pieces)

    def fits(self, pages: int, indices: torch.Tensor) -> bool:
        """Return whether `indices` has as many slots as `pages` whole pages have."""
        return indices.numel() == pages * self.page_slots

    def batches(self, indices: torch.Tensor, *, read: bool) -> Iterator[PageBatch]:
        """Yield batches of the pages in these slots. Finish each batch before taking the next one.

        If `read` is True, call a batch's `land` for each page that was read, because the batch's
        buffers may be temporary.
        """
        if self._is_in_place:
            yield self._in_place(indices)
            return
        for first, slots in self._copied_at_a_time(indices):
            if read:
                pages = [torch.empty(self._flat_length, dtype=self._flat_dtype) for _ in slots]
            else:
                pages = [self.pool.get_data_page(slot).contiguous() for slot in slots]
            land = partial(self._land, slots, pages) if read else _stay
            yield PageBatch(first, [(_one_at_least(page),) for page in pages], land)

    def takes(self, page: torch.Tensor) -> bool:
        """Return whether a tensor is contiguous and has the size of one page."""
        return page.is_contiguous() and page.nbytes == self._flat_length * self._flat_dtype.itemsize

    def of_flat(self, pages: Sequence[torch.Tensor]) -> PageBatch:
        """Return one batch with all these pages, each of which lies in a separate tensor."""
        return PageBatch(0, [(_one_at_least(page),) for page in pages], _stay)

    def _land(self, slots: list[int], pages: list[torch.Tensor], number: int) -> None:
        self.pool.set_from_flat_data_page(slots[number], pages[number])

    def _in_place(self, indices: torch.Tensor) -> PageBatch:
        found = self._pieces_in_place(indices)
        assert found is not None
        return PageBatch(0, found, _stay)

    def _pieces_in_place(self, indices: torch.Tensor) -> list[Buffers] | None:
        if self.pool.layout not in _IN_PIECES:
            return None
        try:
            meta = self.pool.get_page_buffer_meta(indices)
        except (NotImplementedError, ValueError):
            # Do not access the pages in place. A pool that raises one of these errors has more data per
            # page than `get_page_buffer_meta` can report, and this data would be lost.
            return None
        if not meta or not meta[0]:
            return None
        views = [_bytes_at(*each) for each in zip(*meta, strict=True)]
        count = len(views) // (indices.numel() // self.page_slots)
        return [tuple(views[at : at + count]) for at in range(0, len(views), count)]

    def _copied_at_a_time(self, indices: torch.Tensor) -> Iterator[tuple[int, list[int]]]:
        slots = [int(slot) for slot in indices[:: self.page_slots]]
        width = max(1, COPIED_AT_A_TIME // self.page_bytes)
        for first in range(0, len(slots), width):
            yield first, slots[first : first + width]

    def _require_flat_pages(self) -> None:
        try:
            self.pool.get_data_page(0)
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"HiCache's pool {self.name!r} ({type(self.pool).__name__}) has the layout"
                f" {self.pool.layout!r}, which gives no access to single pages; set"
                " --hicache-mem-layout to page_first or page_first_direct"
            ) from error


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    return tensor.detach().flatten().view(torch.uint8).numpy().data


def _memory_of(pool: HicacheHostPool) -> list[memoryview]:
    """Return the memory of a host pool as buffers; empty if the pool does not report it."""
    tensors: Sequence[torch.Tensor] = getattr(pool, "get_hybrid_pool_buffer", list[torch.Tensor])()
    return [tensor_bytes(each) for each in tensors if each.is_contiguous() and each.numel()]


def _one_at_least(page: torch.Tensor) -> memoryview:
    return tensor_bytes(page) if page.numel() else memoryview(bytearray(1))


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def _stay(_: int) -> None:
    """Do nothing, because pages that were read in place need no copy."""
