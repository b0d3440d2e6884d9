"""Lists what is in a store of files, by the headers of the files.

What is gone meanwhile, and what is no object, is passed over. What is there and cannot be read is an
error: whoever copies, verifies or removes all objects has to learn that some were not seen.
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
"""No link is followed, and what is a pipe does not wait for its other end."""
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""What the kernel answers where there is no such file or directory, or no longer."""
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def stored_as(
    directory_fd: int, path: str, contents: FileContents, now: float
) -> StoredObject | None:
    """Return what a file says of itself, and its age at `now`; None if it is no object, or gone.

    Raises OSError if it is a regular file that cannot be read.
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
        said = read_statement(contents.header(fd))
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None
        raise
    finally:
        os.close(fd)
    if isinstance(said, HeaderFinding):
        return None
    age_s = max(0.0, now - status.st_mtime)
    return StoredObject(name=said.name, shape=said.shape, age_s=age_s)


def is_regular(directory_fd: int, path: str) -> bool:
    """Say whether a regular file is at `path`, whether it can be opened or not."""
    try:
        status = os.stat(path, dir_fd=directory_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return stat.S_ISREG(status.st_mode)


def entries(root: Path, root_fd: int, path: str) -> Iterator[str]:
    """Yield the paths of what is in a directory below the root, in any order; none if there is none.

    No link is followed. Raises `StorageError` where the directory is there and cannot be read.
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
    """Return what to raise for something that is there and cannot be read."""
    return StorageError(
        f"{path} cannot be read: {error.strerror}; what is there was not seen, so mend it (its "
        "permissions, the filesystem, the limit of open files) and repeat the call"
    )
