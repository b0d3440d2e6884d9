"""Lists the objects of a `file://` store, by reading the headers of its files.

Files that disappear during the listing and files that are not objects are skipped. An unreadable file
is an error, because a caller that copies, verifies or removes all objects must not miss any.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HeaderFinding, read_statement
from ..base import StoredObject
from .contents import FileContents

READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a file: links are not followed, and opening a named pipe does not block."""
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""The errnos for a file or directory that does not exist or was removed."""
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def stored_as(
    directory_fd: int, path: str, contents: FileContents, now: float
) -> StoredObject | None:
    """Return the object that a file's header describes. The object's age is relative to `now`.

    Returns None if the file is not an object or has disappeared. Raises OSError if a regular file
    cannot be read.
    """
    try:
        fd = os.open(path, READ_FLAGS, dir_fd=directory_fd)
    except OSError as error:
        if error.errno not in GONE and is_regular(directory_fd, path):
            raise
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        statement = read_statement(contents.header(fd))
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None
        raise
    finally:
        os.close(fd)
    if isinstance(statement, HeaderFinding):
        return None
    age_s = max(0.0, now - status.st_mtime)
    return StoredObject(name=statement.name, shape=statement.shape, age_s=age_s)


def is_regular(directory_fd: int, path: str) -> bool:
    """Return whether a regular file exists at `path`, readable or not."""
    try:
        status = os.stat(path, dir_fd=directory_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return stat.S_ISREG(status.st_mode)


def entries(root: Path, root_fd: int, path: str) -> Iterator[str]:
    """Yield the paths of the entries of a directory below the root; nothing if it does not exist.

    Links are not followed. Raises `StorageError` if the directory exists but cannot be read.
    """
    try:
        fd = os.open(path, _DIRECTORY_FLAGS, dir_fd=root_fd)
    except OSError as error:
        if error.errno in GONE:
            return
        raise unreadable(root / path, error) from error
    try:
        with os.scandir(fd) as found:
            for each in found:
                yield f"{path}/{each.name}"
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(root / path, error) from error
    finally:
        os.close(fd)


def unreadable(path: Path, error: OSError) -> StorageError:
    """Return the `StorageError` for a path that exists but cannot be read."""
    return StorageError(
        f"{path} cannot be read: {error.strerror}; the listing is incomplete, so fix the cause "
        "(permissions, filesystem, limit of open files) and repeat the call"
    )
