"""Helpers for callers' buffers: check their size, find their addresses, move their bytes to files.

A buffer of the wrong size is a bug of the caller. Only the read or write with that buffer fails, and
the other ones of the call go on. Accepting the buffer would write past its end or store a truncated
object.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

_NOTHING: Final = memoryview(bytearray())
_VIEWS_MAX: Final = 512
"""Maximum number of buffers per system call; the kernel allows 1024."""


def fitting(
    buffers: Sequence[memoryview], nbytes: int, *, writable: bool = False
) -> list[memoryview] | None:
    """Return byte views of `buffers`, or None if the buffers are unsuitable.

    Suitable buffers are contiguous, have `nbytes` in total, and are writable if `writable` is set.
    """
    views, left = list[memoryview](), nbytes
    try:
        for buffer in buffers:
            if not buffer.c_contiguous or (writable and buffer.readonly):
                return None
            size = buffer.nbytes
            left -= size
            # Use a constant view for an empty buffer, because `cast` raises for some formats of empty
            # buffers.
            views.append(buffer.cast("B") if size else _NOTHING)
    except (TypeError, ValueError):
        # Reject buffers whose element format is not a native one, or whose memory was released.
        return None
    return None if left else views


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return the address of the first byte of `memory`."""
    address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    return address


def move_all(
    system_call: Callable[[int, Sequence[Any], int], int],
    fd: int,
    views: Sequence[memoryview | bytes],
    offset: int,
    block_bytes: int = 1,
) -> int:
    """Transfer `views` by repeated `preadv` or `pwritev` calls; return the number of bytes transferred.

    Stops early if the file ends, the disk is full, or a system call transfers a number of bytes that is
    not a multiple of `block_bytes`. Raises OSError.
    """
    left, done = views, 0
    while left:
        count = system_call(fd, left[:_VIEWS_MAX], offset + done)
        done += count
        if not count or count % block_bytes:
            break
        left = _without(left, count)
    return done


def _without(views: Sequence[memoryview | bytes], count: int) -> Sequence[memoryview | bytes]:
    """Return `views` without their first `count` bytes, and without empty views at the start."""
    for at, view in enumerate(views):
        if count < len(view):
            return [memoryview(view)[count:], *views[at + 1 :]]
        count -= len(view)
    return []
