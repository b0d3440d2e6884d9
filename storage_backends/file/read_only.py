"""The files of a store that is opened with `read_only=1`: nothing there is made, moved or removed.

So a store can be listed and verified where it may not be written to, as on a snapshot or a mount for
reading; and whoever only looks changes nothing for those who use it.
"""

import os
from pathlib import Path

from ...errors import ConfigError
from ...page_format.object_name import OBJECTS, ObjectName
from ..base import WriteOutcome
from ..threaded_backend import Stop
from .objects import Durability, ObjectFiles
from .quarantine import FileQuarantine
from .trust import Trust, check_trust


class _NoQuarantine(FileQuarantine):
    """Leaves everything where it is."""

    def __init__(self) -> None:
        pass

    def put_away(self, *_: object, **__: object) -> bool:
        """Move nothing."""
        return False


class ReadOnlyFiles(ObjectFiles):
    """As `ObjectFiles`, but that every write fails, and what is bad stays and is CORRUPT again."""

    def __init__(self, root: Path, *, trust: Trust = Trust.OWNER, text: str = "") -> None:
        super().__init__(root, Durability.NONE, direct=False, trust=trust, text=text)

    def open(self) -> None:
        """Open the directory, which must be there.

        Raises OSError, and `ConfigError` for a directory that is no store, or that others than are
        trusted could have written to.
        """
        self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not os.access(OBJECTS, os.F_OK, dir_fd=self._root_fd, follow_symlinks=False):
                raise ConfigError(
                    f"there is no store at {self._root}: it has no folder 'objects', and with "
                    "read_only=1 none is made; give the directory that engines have"
                )
            check_trust(self._root, self._root_fd, self._trust)
        except BaseException:
            self.close()
            raise
        self._quarantine = _NoQuarantine()

    def remove(self, name: ObjectName, stop: Stop | None = None) -> bool:  # noqa: ARG002
        """Remove nothing; say whether the name is free."""
        return not self.exists(name)

    def write(self, *_: object, **__: object) -> WriteOutcome:
        """Write nothing."""
        self._complaints.say_read_only()
        return WriteOutcome.FAILED
