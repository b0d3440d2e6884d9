"""Pages of a host pool of HiCache as runs of bytes: in place where a page lies whole, else by copies.

In the layouts `page_first`, `page_first_direct`, `page_first_kv_split` and `page_head` each page lies
in a few pieces (its keys and its values), which are read and written where they are. In `layer_first`,
and in pools that do not say where their pages lie, a page is put together first, a few at a time.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from ....errors import ConfigError
from .contract import HostPool

COPIED_AT_A_TIME: Final = 64 << 20
"""Bytes of pages that are put together for one call to the store."""

_IN_PIECES: Final = ("page_first", "page_first_direct", "page_first_kv_split", "page_head")

Buffers = tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbouring pages of a call, from the page number `first` on."""

    first: int
    buffers: list[Buffers]
    land: Callable[[int], None]
    """Puts the n-th page of the batch, which was read, where it belongs."""


class PoolPages:
    """The pages of one host pool; what they lie in is kept alive."""

    def __init__(self, name: str, pool: HostPool) -> None:
        """Raises `ConfigError` for a pool of which no page can be had."""
        self.name = name
        self.pool = pool
        self.page_slots = pool.page_size
        # SGLang drops its pools before it has ended the threads that write them back.
        self.memory = _memory_of(pool)
        flat = pool.get_dummy_flat_data_page()
        self._flat_dtype, self._flat_length = flat.dtype, flat.numel()
        found = self._pieces_in_place(torch.arange(self.page_slots))
        self._is_in_place = found is not None
        if found is None:
            self._require_flat_pages()
            # A pool that holds no bytes says of a page only that it is there.
            self.pieces = [max(1, self._flat_length * self._flat_dtype.itemsize)]
        else:
            self.pieces = [len(piece) for piece in found[0]]
        self.page_bytes = sum(self.pieces)

    def fits(self, pages: int, indices: torch.Tensor) -> bool:
        """Say whether the indices are those of so many pages."""
        return indices.numel() == pages * self.page_slots

    def batches(self, indices: torch.Tensor, *, read: bool) -> Iterator[Batch]:
        """Yield the pages of these slots with their bytes. One batch is to be used up at a time.

        To `read` with room for them: what was read is to be landed page by page.
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
            yield Batch(first, [(_one_at_least(page),) for page in pages], land)

    def takes(self, page: torch.Tensor) -> bool:
        """Say whether a tensor has the form of one page, and lies in one piece."""
        return page.is_contiguous() and page.nbytes == self._flat_length * self._flat_dtype.itemsize

    def of_flat(self, pages: Sequence[torch.Tensor]) -> Batch:
        """Return pages that lie in tensors of their own."""
        return Batch(0, [(_one_at_least(page),) for page in pages], _stay)

    def _land(self, slots: list[int], pages: list[torch.Tensor], number: int) -> None:
        self.pool.set_from_flat_data_page(slots[number], pages[number])

    def _in_place(self, indices: torch.Tensor) -> Batch:
        found = self._pieces_in_place(indices)
        assert found is not None
        return Batch(0, found, _stay)

    def _pieces_in_place(self, indices: torch.Tensor) -> list[Buffers] | None:
        if self.pool.layout not in _IN_PIECES:
            return None
        try:
            meta = self.pool.get_page_buffer_meta(indices)
        except (NotImplementedError, ValueError):
            # Some pools have more in a page than these pieces, and say so.
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
                f"HiCache's pool {self.name!r} ({type(self.pool).__name__}) has no pages to store in"
                f" the layout {self.pool.layout!r}; give --hicache-mem-layout page_first or"
                " page_first_direct"
            ) from error


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, in place."""
    return tensor.detach().flatten().view(torch.uint8).numpy().data


def _memory_of(pool: HostPool) -> list[memoryview]:
    """Return the memory that a pool's pages lie in, as far as it says so."""
    tensors: Sequence[torch.Tensor] = getattr(pool, "get_hybrid_pool_buffer", list[torch.Tensor])()
    return [tensor_bytes(each) for each in tensors if each.is_contiguous() and each.numel()]


def _one_at_least(page: torch.Tensor) -> memoryview:
    return tensor_bytes(page) if page.numel() else memoryview(bytearray(1))


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def _stay(_: int) -> None:
    """The page was read where it belongs."""
