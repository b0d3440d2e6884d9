"""The files of a `file://` store opened with `read_only=1`: nothing is created, moved or removed.

This allows an operator to list and verify a store on a snapshot or a read-only mount, and to inspect a
store in use.
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
    """The quarantine of a read-only store, which leaves every corrupt file in place."""

    def __init__(self) -> None:
        pass

    def move_to_quarantine(self, *_: object, **__: object) -> bool:
        """Leave the file in place and return False."""
        return False


class ReadOnlyFiles(ObjectFiles):
    """The object files of a read-only store: writes fail, and corrupt files stay where they are."""

    def __init__(self, root: Path, *, trust: Trust = Trust.OWNER, text: str = "") -> None:
        super().__init__(root, Durability.NONE, direct=False, trust=trust, text=text)

    def open(self) -> None:
        """Open the directory, which must exist.

        Raises `ConfigError` if the directory is not a store or if untrusted users can write to it.
        Raises OSError if the directory cannot be opened.
        """
        self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not os.access(OBJECTS, os.F_OK, dir_fd=self._root_fd, follow_symlinks=False):
                raise ConfigError(
                    f"there is no store at {self._root}: it has no folder 'objects', and "
                    "read_only=1 does not create one; give the directory that the engines use"
                )
            check_trust(self._root, self._root_fd, self._trust)
        except BaseException:
            self.close()
            raise
        self._quarantine = _NoQuarantine()

    def remove(self, name: ObjectName, stop: Stop | None = None) -> bool:  # noqa: ARG002
        """Remove nothing; return whether the name is free."""
        return not self.exists(name)

    def write(self, *_: object, **__: object) -> WriteOutcome:
        """Log that the store is read-only and return FAILED."""
        self._complaints.log_read_only()
        return WriteOutcome.FAILED
