"""Host memory that is made ready before it is needed.

The kernel clears a page of memory when it is first touched, which for a page of 2 MiB can take
milliseconds: longer than the copy into it. A thread asks for all of a pool's memory ahead, from the
first page on, which is also the order in which a fresh pool hands its pages out. What is in memory
already is not changed, so nothing has to wait for it.
"""

import ctypes
import threading
from collections.abc import Sequence

import torch

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: make pages present and writable, as if each were written, and leave their content."""
_CHUNK_BYTES = 8 << 20
"""So much at a time: the thread looks this often whether it is to stop."""


class Population:
    """Fills host pools' memory in, one pool after the other.

    On a thread that ends by itself or when it is told to.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self._memories = memories
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for no more memory; `join` waits until the thread has let go of the pool's."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it has not, which a machine short of memory can do."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Called through the C library, which lets other threads go on meanwhile.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for memory in self._memories:
            start, nbytes = memory.data_ptr(), memory.numel()
            for at in range(0, nbytes, _CHUNK_BYTES):
                length = min(_CHUNK_BYTES, nbytes - at)
                # An older kernel, or one that is out of memory, leaves the rest to the first touch.
                if self._stopping.is_set() or madvise(start + at, length, _MADV_POPULATE_WRITE):
                    return
