"""A thread, one per process, that keeps a `file://` store within its quota and time to live.

One process at a time, the holder of the store's sweep lock, runs a pass over the files (`sweep`). The
other processes skip that pass. Reading an object sets no mtime. The object's name is recorded in
memory, and the thread later sets the mtimes of all recorded files. So other processes may see a file in
constant use as unused for one interval. A write sets the mtimes of its files itself, also of those that
existed already.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from math import inf
from typing import Final

from ...page_format.object_name import ObjectName
from ..threaded_backend import DaemonThreads
from .sweep import SweepLimits, sweep_store, sweeping
from .uses import UseTimes

INTERVAL_MAX_S: Final = 60.0
INTERVAL_MIN_S: Final = 1.0
USED_NAMES_MAX: Final = 1 << 16
PASS_MAX_S: Final = 3600.0
"""Maximum seconds of one pass over the files; a later pass continues with the remaining files."""

_log = logging.getLogger(__name__)


class Sweeper:
    """Sweeps the store in the directory `root_fd`. Keeps a duplicate of that descriptor.

    Thread-safe.
    """

    def __init__(self, root_fd: int, limits: SweepLimits) -> None:
        self._limits = limits
        self.interval_s = _interval_s(limits)
        self._root_fd = os.dup(root_fd)
        self._thread = DaemonThreads(1, "lockstep-sweep", at_end=lambda: os.close(self._root_fd))
        self._lock = threading.Lock()
        self._used: dict[ObjectName, None] = {}
        self._written = 0
        self._written_max = inf
        self._wanted = False
        self._removed = threading.Event()
        self._stopping = False
        self._wake = threading.Event()

    def start(self) -> None:
        """Start the thread, which sweeps at once and then at intervals. Call this once."""
        self._thread.submit(self._live)

    def end(self) -> Future[None]:
        """Signal the thread to stop before its next file. Idempotent.

        The returned future is done when the thread has exited.
        """
        self._stopping = True
        self._wake.set()
        return self._thread.end()

    def used(self, names: Iterable[ObjectName]) -> None:
        """Record that the objects `names` were read; the thread later sets the mtimes of their files.

        `names` must be in order from root to leaf. If `USED_NAMES_MAX` names are recorded, further
        names are dropped and count as unused. This is safe, because leaves are dropped before roots.
        """
        with self._lock:
            for name in names:
                if len(self._used) < USED_NAMES_MAX:
                    self._used[name] = None

    def marked(self, names: Iterable[ObjectName]) -> None:
        """Discard the recorded reads of `names`: a write has just set the mtimes of their files."""
        with self._lock:
            for name in names:
                self._used.pop(name, None)

    def wrote(self, nbytes: int) -> None:
        """Count `nbytes` as written, and start a pass after `WRITTEN_PART` of the quota was written."""
        self._written += nbytes
        if self._written >= self._written_max:
            self._written = 0
            self._wanted = True
            self._wake.set()

    def has_removed(self) -> bool:
        """Return whether the sweeper has removed files since the last call of this method."""
        removed = self._removed.is_set()
        if removed:
            self._removed.clear()
        return removed

    def turn(self, *, wanted: bool) -> int | None:
        """Set the mtimes of used files, then run a pass.

        The pass is skipped if another process is running one. It is also skipped if another process
        finished one recently, unless `wanted` is set. `wanted` means that this process has written much
        since the last pass. Returns the number of removed files, or None if no pass ran, for example
        because the whole filesystem holds less than the quota. Raises OSError if the store cannot be
        swept.
        """
        self._mark_used()
        self._written_max = self._limits.written_until_pass(self._root_fd)
        if self._limits.is_kept(self._root_fd):
            return None
        # Skip the pass if another process finished one less than half an interval ago. So in each
        # interval only the first of many processes walks the files.
        with sweeping(self._root_fd, rest_s=0.0 if wanted else self.interval_s / 2) as now:
            if now is None:
                return None
            give_up = time.monotonic() + PASS_MAX_S
            removed = sweep_store(
                self._root_fd,
                self._limits,
                now=now,
                stop=lambda: self._stopping or time.monotonic() >= give_up,
            )
            if removed:
                self._removed.set()
            return removed

    def _live(self) -> None:
        wanted = False
        while not self._stopping:
            try:
                self.turn(wanted=wanted)
            except OSError as error:
                _log.warning("the store cannot be swept now: %s", error)
            self._wake.wait(self.interval_s)
            self._wake.clear()
            wanted, self._wanted = self._wanted, False

    def _mark_used(self) -> None:
        with self._lock:
            used, self._used = list(self._used), {}
        times = UseTimes(self._root_fd)
        for position, name in enumerate(used):
            if self._stopping:
                return
            times.mark(position, [name])


def _interval_s(limits: SweepLimits) -> float:
    if limits.ttl_s is None:
        return INTERVAL_MAX_S
    return min(INTERVAL_MAX_S, max(INTERVAL_MIN_S, limits.ttl_s / 10))
