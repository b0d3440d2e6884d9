"""Calls to stores that ran out of their time: counted, and told in the log once in a while."""

import logging
import threading
import time
from typing import Final

from ...storage_backends.error_log import LoggedError
from .base import LateCalls

MARGIN_SHARE: Final = 0.1
MARGIN_S: Final = 0.25
"""The share of an operation's time, and the most of it, that its last calls leave over so that their
answers are of use."""
_TICK_S: Final = 0.001
"""A timer may ring so much before its time."""

_log = logging.getLogger(__name__)


def answer_by(deadline: float) -> float:
    """Return when the calls of an operation have to answer so that it has its outcome in time.

    A call with one key that hangs says at its deadline what became of the others. At the operation's
    own deadline that would be too late, and the one key would have cost all of them.
    """
    left_s = max(0.0, deadline - time.monotonic())
    return deadline - min(MARGIN_S, MARGIN_SHARE * left_s)


class LateCallsLog:
    """Counts calls that came back only when their time was up, and says so once in a while.

    Thread-safe: all stores of a rank are counted together, each from its own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen = LateCalls()
        """Counters since the start."""
        self._trouble = LoggedError(_log)

    def note(self, began: float, deadline: float) -> None:
        """Take notice of a call that has come back."""
        now = time.monotonic()
        if now + _TICK_S < deadline:
            return
        with self._lock:
            seen = LateCalls(self.seen.calls + 1, self.seen.waited_s + now - began)
            self.seen = seen
        self._trouble.warn(
            "the store times out; calls without an answer in time: %d, and waited for them: %.1f s; "
            "look at the store, or put breaker+ before its URI",
            seen.calls,
            seen.waited_s,
        )
