"""Checks, when a store is opened, that only trusted users can write to its directory.

A checksum detects damage, not forgery: a user with write access can store any bytes under any name.
"""

import errno
import os
import stat
from enum import StrEnum
from pathlib import Path
from typing import Final

from ...errors import ConfigError
from ...page_format.object_name import NAME_DIGEST_BYTES, OBJECTS
from .publish import TEMPORARY
from .quarantine import QUARANTINE

_NAME_CHARACTERS: Final = 1 + 2 * NAME_DIGEST_BYTES
"""Number of characters to cut off an object's path to get its directory: the file name and the
separator."""
_REAL_MAX: Final = 1 << 16
"""Maximum number of directories that are remembered as real directories (not links)."""
BELOW: Final = (OBJECTS, QUARANTINE, TEMPORARY)
"""The names of the directories in the root directory of a `file://` store."""


class Trust(StrEnum):
    """The users who may have write permission for a store's directory."""

    OWNER = "owner"
    GROUP = "group"
    """The owner and members of the directory's group may have write permission."""
    ANY = "any"


def check_trust(root: Path, root_fd: int, trust: Trust) -> None:
    """Raise `ConfigError` if untrusted users can write to the root or to a directory in `BELOW`.

    The root may be sticky like /tmp, where users can remove only their own entries. Then the
    directories in it must belong to this user, the superuser, or the root's owner. Raises OSError if
    the root is not a directory.
    """
    if trust is Trust.ANY:
        return
    top = os.fstat(root_fd)
    _check_mode(root, top, trust)
    owners = {os.geteuid(), 0, top.st_uid}
    for name in BELOW:
        try:
            status = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        _check_mode(root / name, status, trust)
        if status.st_uid not in owners:
            raise ConfigError(
                f"store directory {root / name} belongs to user {status.st_uid}, who could forge "
                "pages; remove it, or add trust=any to the store's URI"
            )


def check_own(root: Path, trust: Trust) -> None:
    """Raise `ConfigError` if untrusted users can create files in the directory `root`.

    A sticky bit does not help, because it does not keep users from creating files.
    """
    if trust is not Trust.ANY:
        _check_mode(root, root.stat(), trust, sticky_helps=False)


def _check_mode(
    path: Path, status: os.stat_result, trust: Trust, *, sticky_helps: bool = True
) -> None:
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        raise ConfigError(f"store directory {path} is a link; put a directory in its place")
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if sticky_helps and mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH:
        change = "go-w" if mode & stat.S_IWGRP and trust is not Trust.GROUP else "o-w"
        raise _refused(path, "everybody", change, Trust.ANY)
    if mode & stat.S_IWGRP and trust is not Trust.GROUP:
        raise _refused(path, f"group {status.st_gid}", "g-w", Trust.GROUP)


def _refused(path: Path, whom: str, change: str, trust: Trust) -> ConfigError:
    return ConfigError(
        f"store directory {path} can be written to by {whom}, who could forge pages; "
        f"run chmod {change} {path}, or add trust={trust} to the store's URI"
    )


class OwnDirectories:
    """Remembers which directories were checked and are not links. Thread-safe.

    A directory is checked only at its first use. The check finds links made by an administrator. It is
    no protection from attackers, because an attacker with write access could change the objects
    themselves.
    """

    def __init__(self) -> None:
        self._real: set[str] = set()

    def foreign(self, root_fd: int, path: str) -> str | None:
        """Return the first ancestor of an object's path that is a link or file, or None."""
        directory = path[:-_NAME_CHARACTERS]
        if directory in self._real:
            return None
        for each in (directory[: directory.rindex("/")], directory):
            try:
                status = os.stat(each, dir_fd=root_fd, follow_symlinks=False)
            except OSError:
                return None
            if not stat.S_ISDIR(status.st_mode):
                return each
        if len(self._real) >= _REAL_MAX:
            self._real.clear()
        self._real.add(directory)
        return None
