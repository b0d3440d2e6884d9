"""Memory that the Mooncake client was told of: the caller's pool, and some of our own beside it.

Bytes go straight between the store and what lies in registered memory. What does not goes through a
room of bounded size, which each thread has, piece by piece.
"""

import mmap
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..errors import ConfigError
from .mooncake_client import MooncakeClient
from .page_object import HEADER_BYTES

KEYS_AT_A_TIME: Final = 32
"""Objects of one call of the client, and header blocks of one thread."""
ROOM_BYTES: Final = 4 << 20


def address_of(view: memoryview) -> int:
    """Return where the bytes of a view lie."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


class Staging:
    """One thread's registered memory."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, KEYS_AT_A_TIME * HEADER_BYTES + ROOM_BYTES))
        self.memory = memory
        self.address = address_of(memory)
        self.room = memory[KEYS_AT_A_TIME * HEADER_BYTES :]
        self.room_address = self.address + KEYS_AT_A_TIME * HEADER_BYTES

    def block(self, number: int) -> memoryview:
        """Return the header block with this number."""
        return self.memory[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]

    def block_address(self, number: int) -> int:
        """Return where that block lies."""
        return self.address + number * HEADER_BYTES


class RegisteredMemory:
    """What one client was told of. Thread-safe."""

    def __init__(self, client: MooncakeClient, memory: Sequence[memoryview]) -> None:
        self._client = client
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._kept: list[Staging] = []
        spans: list[tuple[int, int]] = []
        for view in memory:
            if not view.nbytes:
                continue
            start = address_of(view.cast("B"))
            if not client.register(start, view.nbytes):
                raise ConfigError(
                    f"the Mooncake client cannot register the host pool's {view.nbytes} bytes; with "
                    "protocol=rdma raise the limit on locked memory (ulimit -l)"
                )
            spans.append((start, start + view.nbytes))
        spans.sort()
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def covers(self, views: Sequence[memoryview]) -> bool:
        """Say whether all these bytes lie in the caller's registered memory."""
        for view in views:
            start = address_of(view)
            at = bisect_right(self._starts, start) - 1
            if at < 0 or start + len(view) > self._ends[at]:
                return False
        return True

    def staging(self) -> Staging:
        """Return this thread's own memory."""
        found: Staging | None = getattr(self._threads, "staging", None)
        if found is None:
            found = Staging()
            with self._lock:
                # It must outlive the thread: only `close` of the client takes it back.
                self._kept.append(found)
                if not self._client.register(found.address, len(found.memory)):
                    raise OSError("the Mooncake client cannot register memory")
            self._threads.staging = found
        return found
