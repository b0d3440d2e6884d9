"""Memory registered with the Mooncake client: the caller's pool, and staging memory.

Bytes of a write go directly from the caller's memory to the store if that memory is registered.
Otherwise they go piece by piece through the thread's staging memory, which has a fixed size. Bytes of
all reads go through staging memory (`staged_reads`).
"""

import logging
import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

from ...errors import ConfigError
from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_shape import Plan, pieces_of
from ..buffers import address_of
from .client import MooncakeClient

KEYS_AT_A_TIME: Final = 32
"""Maximum number of objects per call of the client. Each thread's staging memory has one header block
for each of them."""
ROOM_BYTES: Final = 4 << 20
STAGING_BYTES: Final = KEYS_AT_A_TIME * HEADER_BYTES + ROOM_BYTES
WRITTEN_OFF_MAX: Final = 32
"""After this number of staging memories (132 MiB in total) was abandoned, all reads fail."""

_log = logging.getLogger(__name__)


class StagingMemory:
    """One thread's staging memory, registered with the client."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, STAGING_BYTES))
        self.memory = memory
        self.address = address_of(memory)
        self.room = memory[KEYS_AT_A_TIME * HEADER_BYTES :]
        self.room_address = self.address + KEYS_AT_A_TIME * HEADER_BYTES

    def block(self, number: int) -> memoryview:
        """Return the header block with this index."""
        return self.memory[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]

    def block_address(self, number: int) -> int:
        """Return the address of the header block with this index."""
        return self.address + number * HEADER_BYTES


class RegisteredMemory:
    """The memory registered with one client. Thread-safe."""

    def __init__(self, client: MooncakeClient, memory: Sequence[memoryview]) -> None:
        self._client = client
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._kept: list[StagingMemory] = []
        self._written_off = 0
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
        """Return whether all buffers lie within the memory that the caller registered."""
        for view in views:
            start = address_of(view)
            at = bisect_right(self._starts, start) - 1
            if at < 0 or start + len(view) > self._ends[at]:
                return False
        return True

    @property
    def is_used_up(self) -> bool:
        """Return whether too much staging memory was abandoned, so that reads must fail."""
        return self._written_off >= WRITTEN_OFF_MAX

    def write_off(self) -> None:
        """Abandon this thread's staging memory, because late bytes may still be written to it."""
        del self._threads.staging
        with self._lock:
            self._written_off += 1
            written_off = self._written_off
        if written_off == WRITTEN_OFF_MAX:
            _log.warning(
                "%d failed reads from a Mooncake Store may still receive bytes, so their %d MiB of "
                "memory are lost and reads from the store have stopped; repair the network, and "
                "attach the store again",
                written_off,
                written_off * STAGING_BYTES >> 20,
            )

    def staging(self) -> StagingMemory:
        """Return this thread's staging memory."""
        found: StagingMemory | None = getattr(self._threads, "staging", None)
        if found is None:
            found = StagingMemory()
            with self._lock:
                # Keep a reference to the memory after the thread exits, because only `close` of the
                # client unregisters the memory.
                self._kept.append(found)
                if not self._client.register(found.address, len(found.memory)):
                    raise OSError("the Mooncake client cannot register memory")
            self._threads.staging = found
        return found


def staging_views(
    buffers: Sequence[memoryview], plan: Plan
) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut the planned parts of an object into consecutive pieces of at most `ROOM_BYTES`.

    Yields (offset in the object, views) of each piece.
    """
    runs = pieces_of(buffers, [run.nbytes for run in plan.runs])
    for run, views in zip(plan.runs, runs, strict=True):
        whole, rest = divmod(run.nbytes, ROOM_BYTES)
        steps = [ROOM_BYTES] * whole + [rest] * bool(rest)
        at = HEADER_BYTES + run.offset
        for some in pieces_of(views, steps):
            yield at, some
            at += sum(map(len, some))
