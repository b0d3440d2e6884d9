"""Lists what is in a store of files, by the headers of the files.

What is gone meanwhile, and what is no object, is passed over. What is there and cannot be read is an
error: whoever copies, verifies or removes all objects has to learn that some were not seen.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HeaderFinding, read_statement
from ...page_format.object_name import ObjectName
from ..base import StoredObject
from .contents import FileContents

READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, and what is a pipe does not wait for its other end."""
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""What the kernel answers where there is no such file or directory, or no longer."""
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def stored_objects(
    root: Path,
    root_fd: int,
    objects: str,
    contents: FileContents,
    path_of: Callable[[ObjectName], str | None],
) -> Iterator[StoredObject]:
    """Yield what is below the directory `objects`, in any order, as far as its header is sound.

    `path_of` says where an object belongs: one in another place is left out, since its name leads to
    another file or to none. Ages are as of the beginning, so that they put all
    objects in the order of their use. Raises `StorageError` where something cannot be read.
    """
    now = time.time()
    for namespace in entries(root, root_fd, objects):
        for digits in entries(root, root_fd, namespace):
            for path in entries(root, root_fd, digits):
                try:
                    stored = stored_as(root_fd, path, contents, now)
                except OSError as error:
                    raise unreadable(root / path, error) from error
                if stored is not None and path == path_of(stored.name):
                    yield stored


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
