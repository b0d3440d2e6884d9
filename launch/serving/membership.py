"""A group's place in the directory: registered, renewed while its engine steps, left at the end."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from ...errors import StorageError
from ...ranks.disaggregation.groups.directory import GroupDirectory, Registration

_RENEWALS = 4
"""How often a lease is renewed before it would be over."""

log = logging.getLogger("lockstep")


class Membership:
    """Keeps a group listed, on a thread of its own. Close it."""

    def __init__(
        self,
        directory: GroupDirectory,
        registration: Registration,
        lease_s: float,
        *,
        steps: Callable[[], int],
        on_new_life: Callable[[int], None],
    ) -> None:
        """`steps` counts those of the engine: one that stands still is not renewed.

        `on_new_life` is told the life of the group where its lease was over and it is listed again.
        """
        self._directory = directory
        self._registration = registration
        self._lease_s = lease_s
        self._steps = steps
        self._on_new_life = on_new_life
        self._lease = directory.register(registration, lease_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lockstep-lease", daemon=True)
        self._thread.start()

    @property
    def life(self) -> int:
        """The life of the group."""
        return self._lease.life

    def close(self) -> None:
        """Take the group off the list."""
        self._stop.set()
        self._thread.join()
        with suppress(StorageError):
            self._directory.leave(self._lease)
        self._directory.close()

    def _renew(self) -> None:
        seen = -1
        while not self._stop.wait(self._lease_s / _RENEWALS):
            steps = self._steps()
            if steps == seen:
                continue
            seen = steps
            try:
                if self._directory.renew(self._lease, self._lease_s):
                    continue
                self._lease = self._directory.register(self._registration, self._lease_s)
                self._on_new_life(self._lease.life)
            except StorageError as error:
                log.warning("group %s was not renewed: %s", self._registration.name, error)
