"""Buffers that callers hand over: whether they fit what they are for, and where their bytes lie.

A buffer that does not fit is the caller's bug, and what it costs is that key alone: bytes that go
beyond a buffer, or an object shorter than it says, would harm others.
"""

import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np

_NOTHING: Final = memoryview(bytearray())


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
