"""Pages moved between pinned host memory, where they lie anywhere, and rows on the device.

One launch moves any number of pages, where the copy engine needs a call for each run of neighbours. The
device reads and writes host memory itself, with few programs, so that the engine's kernels keep its
processors: each program has so many bytes under way that a few of them keep the link busy.
"""

import torch
import triton
import triton.language as tl

# On an H200 four such programs move 0.94 of what the copy engine does to the host and 0.91 back; two
# fall to 0.64 on the way back.
PROGRAMS = 4
"""Each takes one of the device's processors, or half of it, while pages are moved."""
BLOCK_BYTES = 32 << 10
"""Bytes that one program has in flight."""
WARPS = 16
_PIECE_BYTES_MAX = 8 << 10
_WORD = torch.int64
_ACCESS_BYTES = 16
"""Bytes that one thread reads or writes at a time; addresses are multiples of it."""


def movable(page_bytes: int) -> bool:
    """Say whether pages of this size can be moved."""
    return page_bytes % _ACCESS_BYTES == 0


# These numbers say nothing about the code, which would be compiled anew for some of them.
@triton.jit(do_not_specialize=["pieces", "in_page"])
def _move(  # noqa: PLR0917 - Triton passes over parameters that have to be named.
    rows: tl.tensor,
    pages: tl.tensor,
    staging: tl.tensor,
    pieces: int,
    in_page: int,
    to_host: tl.constexpr,
    length: tl.constexpr,
    count: tl.constexpr,
) -> None:
    """Move pieces of `length` words, of which `in_page` make a page; each program `count` at a time."""
    words = tl.arange(0, length)[None, :]
    for first in range(tl.program_id(0) * count, pieces, tl.num_programs(0) * count):
        piece = first + tl.arange(0, count)
        some = (piece < pieces)[:, None]
        page = tl.load(pages + piece // in_page, piece < pieces, 0)
        on_host = rows + ((page * in_page + piece % in_page) * length)[:, None] + words
        on_device = staging + (piece.to(tl.int64) * length)[:, None] + words
        # Nothing is read twice, so that the first cache is left out.
        if to_host:
            tl.store(on_host, tl.load(on_device, some, 0, cache_modifier=".cg"), some)
        else:
            tl.store(on_device, tl.load(on_host, some, 0, cache_modifier=".cg"), some)


def move_rows(
    rows: torch.Tensor, pages: torch.Tensor, staging: torch.Tensor, *, to_host: bool
) -> None:
    """Move row i of `staging` to the host page `pages[i]` for each i, or back.

    `rows` are host pages, pinned, uint8 [any, page_bytes]; `staging` is uint8 [n, page_bytes] and
    `pages` int64 [n], both on the current device and at multiples of 16 bytes. All are contiguous. The
    work is put on the current stream.
    """
    page_bytes = rows.shape[1]
    # The largest power of two that divides a page, since that is what blocks are made of.
    piece_bytes = min(page_bytes & -page_bytes, _PIECE_BYTES_MAX)
    in_page = page_bytes // piece_bytes
    _move[(PROGRAMS,)](
        rows.view(_WORD),
        pages,
        staging.view(_WORD),
        len(staging) * in_page,
        in_page,
        to_host=to_host,
        length=piece_bytes // _WORD.itemsize,
        count=BLOCK_BYTES // piece_bytes,
        num_warps=WARPS,
    )
