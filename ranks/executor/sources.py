"""The groups that this rank reads pages from out of their host memory, each by the URI that serves it.

A source is connected when something is first asked of it, and let go of when others need its place and
nothing runs for it. One that could not be connected to is left alone for a while: what is asked of it
is missing. All is called from the engine's thread.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from ...errors import ConfigError
from ...storage_backends.error_log import LoggedError
from ...storage_backends.handshake import UNPROVEN_S, UnprovenError
from .storage_loop import StorageLoop

_log = logging.getLogger(__name__)

SOURCES_MAX = 32
"""Groups that may be connected at a time; each has a thread."""
CLOSING_MAX = 128
"""Groups that were let go of and whose threads have not ended, as while a host name is looked up."""
OPEN_TIMEOUT_S = 5.0
"""How long a group may take to answer; what was asked of it is missing then."""
REFUSED_S = 5.0
"""For how long nothing is asked of a group that could not be connected to."""

MakeLoop = Callable[[str], StorageLoop]
"""Makes the loop that reads from a source, which is not started yet.

Raises `ConfigError` for a URI that makes no sense.
"""


class Sources:
    """Hands orders to the loops of sources."""

    def __init__(self, make_loop: MakeLoop, close_timeout_s: float) -> None:
        self._make_loop = make_loop
        self._close_timeout_s = close_timeout_s
        self._loops: OrderedDict[str, StorageLoop] = OrderedDict()
        """The connected ones by URI, the one that was last used at the end."""
        self._closing: list[StorageLoop] = []
        self._troubles = LoggedError(_log)

    def stop(self) -> None:
        """Cancel everything; does not wait."""
        for source in list(self._loops):
            self._let_go(source)

    def join(self, timeout_s: float) -> bool:
        """After `stop`: wait until nothing touches the pools; say whether that is so."""
        until = time.monotonic() + timeout_s
        ended = [loop.join(max(0.0, until - time.monotonic())) for loop in self._closing]
        return all(ended)

    def loop(self, source: str) -> StorageLoop | None:
        """Return what carries out orders for a source, which is connected; None if it cannot be."""
        loop = self._loops.get(source)
        if loop is not None and loop.trouble() is not None:
            self._complain(source, loop.trouble())
            if _is_left_alone(loop):
                return None
            self._let_go(source)
            loop = None
        if loop is None:
            if len(self._loops) >= SOURCES_MAX and not self._make_place():
                self._complain(source, "as many other groups are being read from as may be")
                return None
            try:
                loop = self._make_loop(source)
            except ConfigError as error:
                # The URI came from another group; what it promised is missing here.
                self._complain(source, str(error))
                return None
            loop.start(OPEN_TIMEOUT_S, partial(self._complain, source))
            self._loops[source] = loop
        self._loops.move_to_end(source)
        return loop

    def _make_place(self) -> bool:
        """Let go of the source that is worth least, and of these the one not used for longest.

        Anybody can name an address where nobody answers, so one that is used and has answered stays.
        """
        closing = [each for each in self._closing if not each.join(0.0)]
        least = min(self._loops, key=lambda source: _worth(self._loops[source]))
        if all(_worth(self._loops[least])) or len(closing) >= CLOSING_MAX:
            return False
        self._let_go(least)
        return True

    def _complain(self, source: str, trouble: str | None) -> None:
        self._troubles.warn(
            "nothing is read from %.200r, which counts as missing: %.500s", source, trouble
        )

    def _let_go(self, source: str) -> None:
        loop = self._loops.pop(source)
        loop.stop(self._close_timeout_s, opening=True)
        self._closing = [loop, *(each for each in self._closing if not each.join(0.0))]


def _worth(loop: StorageLoop) -> tuple[bool, bool, bool]:
    """Say whether a source lives, is used, and has answered: what matters most comes first."""
    return loop.trouble() is None, not loop.is_idle(), not loop.is_opening()


def _is_left_alone(loop: StorageLoop) -> bool:
    if loop.failure is None:
        return False
    error, at = loop.failure
    pause_s = UNPROVEN_S if isinstance(error, UnprovenError) else REFUSED_S
    return time.monotonic() < at + pause_s
