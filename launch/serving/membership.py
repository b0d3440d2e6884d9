"""A group's place in the directory: registered, renewed while its engine steps, left at the end."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from ...errors import StorageError
from ...ranks.disaggregation.groups.directory import GroupDirectory, Registration

RENEWALS = 4
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

        A group of this name that is listed gives way; if it lives, it says so and waits until the name
        is free again. `on_new_life` is told the life of the group where its lease was over and it is
        listed again.
        """
        self._directory = directory
        self._registration = registration
        self._lease_s = lease_s
        self._steps = steps
        self._on_new_life = on_new_life
        self._seen = -1
        self._gave_way = False
        before = self._other()
        self._lease = directory.register(registration, lease_s)
        if before is not None:
            log.warning("group %s takes the place of one at %s", registration.name, before)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-lease", daemon=True)
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

    def renew(self) -> None:
        """Let the group stay listed, or be listed again, if its engine has stepped since last time."""
        steps = self._steps()
        if steps == self._seen:
            return
        self._seen = steps
        try:
            if self._directory.renew(self._lease, self._lease_s) or self._gives_way():
                return
            self._lease = self._directory.register(self._registration, self._lease_s)
            self._on_new_life(self._lease.life)
        except StorageError as error:
            log.warning("group %s was not renewed: %s", self._registration.name, error)

    def _run(self) -> None:
        while not self._stop.wait(self._lease_s / RENEWALS):
            self.renew()

    def _gives_way(self) -> bool:
        """Say whether another group has this one's name by now, which is said once in a log."""
        other = self._other()
        if other is not None and not self._gave_way:
            log.error(
                "group %s is listed no more: one that was started later has its name, at %s; give each"
                " group a name of its own",
                self._registration.name,
                other,
            )
        self._gave_way = other is not None
        return self._gave_way

    def _other(self) -> str | None:
        """Return where a group of this name is reached that is listed and is not this one."""
        own = self._registration
        for each in self._directory.groups().members:
            listed = each.registration
            if listed.name == own.name and listed.start != own.start:
                return listed.addresses.get("messages", "no address")
        return None
