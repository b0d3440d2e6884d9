"""Whether a caller's buffers fit what they are for: checked for each key when a call comes in.

A buffer that does not fit is the caller's bug, and what it costs is that key alone: bytes that go
beyond a buffer, or an object shorter than it says, would harm others.
"""

from collections.abc import Sequence
from typing import Final

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
