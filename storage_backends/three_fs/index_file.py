"""The SQLite file of a page index: its URI, its creation, and the reasons for its errors."""

import errno
import os
import sqlite3
import time
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ...errors import ConfigError
from ..file.publish import DIRECTORY_MODE, FILE_MODE
from ..uri import without_secrets

_ROOM_MIN_BYTES: Final = 1 << 20
"""Free bytes that SQLite needs for a few pages and its shared-memory file. With less free space, an
error of the database is reported as a full filesystem."""
_NO_ROOM: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_LOCKED_AGAIN_S: Final = 0.01
_PRIMARY: Final = 0xFF
"""Mask for the primary part of SQLite's extended error codes."""


def path_of(text: str) -> Path:
    """Return the path in `sqlite:///absolute/path`. Raises `ConfigError` for anything else."""
    scheme, separator, _ = text.partition("://")
    if scheme != "sqlite" or not separator:
        raise ConfigError(
            f"index {without_secrets(text)!r} is not known; write sqlite:///absolute/path"
        )
    try:
        parts = urlsplit(text)
        path = "" if parts.netloc or parts.query else unquote(parts.path, errors="strict")
    except ValueError:
        path = ""
    if not path.strip("/"):
        raise ConfigError(f"index {without_secrets(text)!r}: write sqlite:///absolute/path")
    if "\0" in path:
        raise ConfigError(f"index {without_secrets(text)!r}: the path has a NUL character")
    return Path(path)


def make_file(path: Path, home: Path | None) -> None:
    """Create the file with mode 0600 if it does not exist. Raises OSError.

    A missing directory is created only within `home`, the store's own directory. Elsewhere a missing
    directory is an error, because the path may be misspelt.
    """
    directory = path.parent
    if home is not None and Path(os.path.normpath(path)).is_relative_to(home):
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    elif not directory.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, f"there is no directory {directory}; create it, or correct the path"
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    os.close(os.open(path, flags, FILE_MODE))


def use_wal(database: sqlite3.Connection, timeout_s: float) -> str:
    """Switch a database to WAL mode, and return the mode that it then has.

    Retries, because SQLite does not wait if two connections switch at the same time. Raises
    `sqlite3.OperationalError` if others keep the database locked until the timeout.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if (
                error.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY
                or time.monotonic() >= until
            ):
                raise
            time.sleep(_LOCKED_AGAIN_S)
        else:
            return str(mode)


def open_error(error: Exception, path: Path) -> str:
    """Return the reason why opening the index failed, with the remedy."""
    if _has_no_room(error, path):
        return query_error(error, path)
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return str(error.strerror)
    return f"{error}; give the path of a file on a local filesystem that this process may write"


def query_error(error: Exception, path: Path) -> str:
    """Return the reason why a query of the index failed, with a remedy if its filesystem is full."""
    if _has_no_room(error, path):
        return f"the filesystem of {path.parent} is full ({error}); make room on it"
    return str(error)


def _has_no_room(error: Exception, path: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & _PRIMARY
    if code not in _NO_ROOM:
        return False
    if code == sqlite3.SQLITE_FULL:
        return True
    try:
        there = os.statvfs(path.parent)
    except OSError:
        return False
    no_inode = bool(there.f_files) and not there.f_favail
    return no_inode or there.f_bavail * there.f_frsize < _ROOM_MIN_BYTES
