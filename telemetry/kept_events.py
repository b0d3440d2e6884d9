"""The timed events of one rank, kept in bounded memory, and serialised to be merged across ranks."""

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
"""The maximum number of events kept per rank: about 25 MB of memory, and 30 MB in a timeline file."""


class RankEvents(Record, frozen=True, kw_only=True):
    """The timed events that one rank kept, and the clock that their times are read from."""

    rank: int
    clock: str
    """The id of the clock. Two ranks have equal ids exactly if they read the same clock."""
    wall_s: float
    """The seconds to add to a time of the rank's clock to get wall-clock time."""
    left_out: int
    """The number of events dropped before the first one kept."""
    events: Sequence[TimedEvent]

    def pack(self) -> bytes:
        """Return these events and their clock as compressed bytes."""
        return zlib.compress(_EVENTS.encode(self), level=1)

    @staticmethod
    def unpack(packed: bytes) -> "RankEvents":
        """Return the events and their clock that `pack` serialised."""
        return _EVENTS.decode(zlib.decompress(packed))


_EVENTS: Final[Codec[RankEvents]] = Codec(RankEvents)


class KeptEvents:
    """Keeps the latest events of one rank. Pass the method `note` to `Cache.open` as `timeline`.

    Memory is bounded: once `events_max` events are kept, each new one drops the oldest, and dropped
    events are counted.
    """

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._lock = threading.Lock()
        self._events: deque[TimedEvent] = deque(maxlen=events_max)
        self._noted = 0

    def note(self, event: TimedEvent) -> None:
        """Record an event. Thread-safe."""
        with self._lock:
            self._events.append(event)
            self._noted += 1

    def of_rank(self, rank: int) -> RankEvents:
        """Return the events kept until now, with their rank and clock."""
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
    """Return an id of the clock that `time.monotonic` reads in this process.

    Processes on one kernel share the clock, unless they are in different time namespaces, which have
    separate offsets.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/time")
    return f"{boot} {namespace.readlink() if namespace.is_symlink() else 'time'}"
