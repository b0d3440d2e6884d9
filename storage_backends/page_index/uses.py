"""Which keys were used since the index was last written: kept in memory, as a read writes nothing."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

USES_KEPT_MAX: Final = 4096
USES_KEPT_S: Final = 5.0


class Uses:
    """Keys with the time of their last use, in microseconds since 1970. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[bytes, int] = {}
        self._since_s = 0.0
        self._last = 0

    def __bool__(self) -> bool:
        return bool(self._times)

    def now(self) -> int:
        """Return the time; never the same twice, so that what was used can be put in order."""
        with self._lock:
            return self._next()

    def note(self, keys: Iterable[bytes]) -> bool:
        """Note that these are used now, and say whether it is time to write them into the index."""
        with self._lock:
            if not self._times:
                self._since_s = time.monotonic()
            elif len(self._times) >= 2 * USES_KEPT_MAX:
                # They could not be written. To lose some only makes recency less exact.
                self._times.clear()
            for key in keys:
                self._times[key] = self._next()
            old = bool(self._times) and time.monotonic() >= self._since_s + USES_KEPT_S
            return old or len(self._times) >= USES_KEPT_MAX

    def pop_all(self) -> list[tuple[int, bytes]]:
        """Return the times and keys that were noted, and forget them."""
        with self._lock:
            times, self._times = self._times, {}
        return [(used, key) for key, used in times.items()]

    def forget(self, key: bytes) -> None:
        """Forget the uses of a key, whose entry says when it was used."""
        with self._lock:
            self._times.pop(key, None)

    def _next(self) -> int:
        self._last = max(self._last + 1, int(self._clock() * 1e6))
        return self._last
