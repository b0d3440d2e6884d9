"""The timed events of one rank, kept in bounded memory, and packed for whoever puts ranks together."""

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..coordinator.codec import Codec, Record
from ..ranks.protocol.timed_events import TimedEvent

EVENTS_MAX: Final = 1 << 17
"""About 25 MB of memory, and 30 MB of a timeline's file, for each rank."""


class RankEvents(Record, frozen=True, kw_only=True):
    """What one rank has kept, and on which clock."""

    rank: int
    clock: str
    """Names the clock that the times are of: equal where two ranks read the very same one."""
    wall_s: float
    """What to add to a time of that clock to have that of the wall clock."""
    left_out: int
    """How many events came before those that were kept."""
    events: Sequence[TimedEvent]

    def pack(self) -> bytes:
        """Return all of it as bytes."""
        return zlib.compress(_EVENTS.encode(self), level=1)

    @staticmethod
    def unpack(packed: bytes) -> "RankEvents":
        """Return what `pack` packed."""
        return _EVENTS.decode(zlib.decompress(packed))


_EVENTS: Final[Codec[RankEvents]] = Codec(RankEvents)


class KeptEvents:
    """Keeps the last events of one rank; `note` is the timeline to open its cache with.

    Memory is bounded: once `events_max` are kept, the oldest leaves for each that comes, and is
    counted.
    """

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._lock = threading.Lock()
        self._events: deque[TimedEvent] = deque(maxlen=events_max)
        self._noted = 0

    def note(self, event: TimedEvent) -> None:
        """Keep an event; any thread may call."""
        with self._lock:
            self._events.append(event)
            self._noted += 1

    def of_rank(self, rank: int) -> RankEvents:
        """Return what is kept by now, as that of a rank."""
        with self._lock:
            events, noted = list(self._events), self._noted
        return RankEvents(
            rank=rank,
            clock=_this_clock(),
            wall_s=time.time() - time.monotonic(),
            left_out=noted - len(events),
            events=events,
        )


def _this_clock() -> str:
    """Return a name of the clock that `time.monotonic` reads in this process.

    Processes that run on one kernel since the same boot share it, unless they are in different time
    namespaces, which have offsets of their own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/time")
    return f"{boot} {namespace.readlink() if namespace.is_symlink() else 'time'}"
