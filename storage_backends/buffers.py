"""Buffers that callers hand over: whether they fit, where their bytes lie, and how these get to files.

A buffer that does not fit is the caller's bug, and what it costs is that key alone: bytes that go
beyond a buffer, or an object shorter than it says, would harm others.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

_NOTHING: Final = memoryview(bytearray())
_VIEWS_MAX: Final = 512
"""Handed to the kernel in one call, which takes 1024."""


def fitting(
    buffers: Sequence[memoryview], nbytes: int, *, writable: bool = False
) -> list[memoryview] | None:
    """Return views of the bytes of `buffers`, or None if they cannot be used.

    They must be contiguous, `nbytes` long together and, for a read, writable.
    """
    views, left = list[memoryview](), nbytes
    try:
        for buffer in buffers:
            if not buffer.c_contiguous or (writable and buffer.readonly):
                return None
            size = buffer.nbytes
            left -= size
            # What has no bytes may be of a form that cannot be cast.
            views.append(buffer.cast("B") if size else _NOTHING)
    except (TypeError, ValueError):
        # Elements that have no single native format, or memory that was released.
        return None
    return None if left else views


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return the address of the first byte."""
    address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    return address


def move_all(
    system_call: Callable[[int, Sequence[Any], int], int],
    fd: int,
    views: Sequence[memoryview | bytes],
    offset: int,
    block_bytes: int = 1,
) -> int:
    """Move bytes by `preadv` or `pwritev` in as many calls as it takes; return how many were moved.

    They are fewer than all where the file ends, or has no room. A call that ends within a block, where
    no next one could begin, is the last. Raises OSError.
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
    """Return `views` without their first `count` bytes, and without empty ones before the rest."""
    for at, view in enumerate(views):
        if count < len(view):
            return [memoryview(view)[count:], *views[at + 1 :]]
        count -= len(view)
    return []
