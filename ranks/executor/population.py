"""Host memory that is made ready before it is needed.

The kernel clears a page of memory when it is first touched, which for a page of 2 MiB can take
milliseconds: longer than the copy into it. Threads ask for all of the pools' memory ahead, from the
first page on, which is also the order in which a fresh pool hands its pages out. What is in memory
already is not changed, so nothing has to wait for them; a page that is needed before they come to it
costs its first touch. The first prefetches come right after opening, and would go half as fast beside
threads that clear memory for later ones: so these wait while bytes of a store are in flight. Under load
that never ends, what is left costs its first touch.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: make pages present and writable, as if each were written, and leave their content."""
_CHUNK_BYTES = 8 << 20
"""So much at a time: each thread looks this often whether it is to stop."""
_LOOK_AGAIN_S = 0.005
POPULATION_THREADS = "lockstep-populate"
"""The name of the threads."""
_THREADS_MAX = 4
"""More are limited by memory."""
_CORES_A_THREAD = 4

_Chunk = tuple[int, int]
"""An address and a number of bytes."""


class Population:
    """Fills host pools' memory in, one pool after the other.

    On threads that end by themselves or when they are told to, and do nothing while `is_busy`.
    """

    def __init__(self, memories: Sequence[torch.Tensor], is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        # They keep the memory there until the last thread has let go of it.
        self._memories = memories
        self._chunks = _chunks_of(memories)
        self._taking = threading.Lock()
        self._stopping = threading.Event()
        count = max(1, min(_THREADS_MAX, (os.cpu_count() or 1) // _CORES_A_THREAD))
        self._threads = [
            threading.Thread(target=self._run, name=POPULATION_THREADS, daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask for no more memory; `join` waits until the threads have let go of the pools'."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; False if one has not, which a machine short of memory can do."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        # Called through the C library, which lets other threads go on meanwhile.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while (chunk := self._next()) is not None:
            # An older kernel, or one that is out of memory, leaves the rest to the first touch.
            if madvise(*chunk, _MADV_POPULATE_WRITE):
                self._stopping.set()

    def _next(self) -> _Chunk | None:
        with self._taking:
            # One of them looks, and the others wait for it.
            while self._is_busy() and not self._stopping.wait(_LOOK_AGAIN_S):
                pass
            return None if self._stopping.is_set() else next(self._chunks, None)


def _chunks_of(memories: Sequence[torch.Tensor]) -> Iterator[_Chunk]:
    for memory in memories:
        start, nbytes = memory.data_ptr(), memory.numel()
        for at in range(0, nbytes, _CHUNK_BYTES):
            yield start + at, min(_CHUNK_BYTES, nbytes - at)
