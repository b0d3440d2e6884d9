"""Shortfalls: a line in the log names rank, page and reason when a rank lacks what the others have.

Every rank knows the same shortfalls, so only the first one speaks of them.
"""

import logging
import time
from collections.abc import Iterable

from ...protocol.notices import Lacking, Notice

QUIET_S = 1.0
"""After a line, further shortfalls are only counted for this long: a lost disk has many."""

log = logging.getLogger("lockstep")


class Shortfalls:
    """Tells of shortfalls on rank 0, at a bounded rate."""

    def __init__(self, rank: int) -> None:
        self._speaks = rank == 0
        self._silent_until = 0.0
        self._untold = 0

    def tell_of(self, notices: Iterable[Notice]) -> None:
        """Tell of what is lacking among notices."""
        if self._speaks:
            for notice in notices:
                if isinstance(notice, Lacking):
                    self._tell(notice)

    def _tell(self, notice: Lacking) -> None:
        """Log one shortfall, or count it for the next line."""
        now = time.monotonic()
        if now < self._silent_until:
            self._untold += 1
            return
        self._silent_until = now + QUIET_S
        untold, self._untold = self._untold, 0
        log.warning(
            "rank %s lacks page %d of request %s (key %s): %s; every rank goes on without it%s",
            notice.rank,
            notice.page,
            notice.request,
            notice.key.hex()[:16],
            notice.reason,
            f" ({untold} more like it since the last line)" if untold else "",
        )
