"""What keeps a store of files from being written, said once and not with every page that is lost by it.

Each page that is not stored is counted, but a count does not say why. The reason is nearly always one
for all of them, a full disk for example, and whoever runs the store has to hear of it.
"""

import errno
import logging
import os
import time
from collections.abc import Callable

from ..complaints import Trouble, remedy_for

_log = logging.getLogger(__name__)


class WriteComplaints:
    """Says why the writes to one store fail, as often as `Trouble` has it.

    `store` names it, without secrets. Thread-safe.
    """

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._trouble = Trouble(clock)

    def went_well(self) -> None:
        """Note that a write went well."""
        self._trouble.went_well()

    def failed(self, error: OSError) -> None:
        """Say that a write failed, with the system's reason and a remedy."""
        if self._trouble.is_to_be_said():
            _log.warning(
                "store %s: a page could not be written: %s; %s",
                self._store,
                error.strerror or os.strerror(error.errno or errno.EIO),
                remedy_for(error.errno),
            )

    def refused(self) -> None:
        """Say that the store was opened for looking only."""
        if self._trouble.is_to_be_said():
            _log.warning(
                "store %s is read-only, and nothing is written to it; leave out read_only=1 where "
                "pages are to be stored",
                self._store,
            )
