"""Finds what lies among the objects of a store of files and is no object, and puts it away if asked.

A listing yields objects, and a read finds what is wrong with the one that it asks for. Neither meets
a file whose header is bad, a file under another's name, somebody's notes, or a directory where a file
should be: no name leads there, and it takes room all the same. An object whose header is sound is not
yielded here, even if its payload is bad: a read finds that.
"""

import os
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...page_format.object_header import HeaderFinding, read_statement
from ...page_format.object_name import NAME_DIGEST_BYTES, OBJECTS, name_digest, object_path
from .contents import FileContents
from .listing import GONE, READ_FLAGS, entries, unreadable
from .quarantine import QUARANTINE, FileQuarantine
from .turns import Turns

_PLACE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens anything as a mere place: nothing is read, no link is followed, and no pipe waits."""
_LEVELS: Final = 2
"""Directories above an object: that of its namespace, and of the first digits of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsoundFile:
    """Something among the objects that is none."""

    path: str
    """Below the store's directory."""
    finding: HeaderFinding
    """What is wrong with it; NAME also for a sound object in the wrong place."""
    mode: int
    """The mode that `os.stat` tells: what it is, if no regular file."""
    nbytes: int
    """Its length, 0 for what is no regular file."""
    put_away: bool
    """Whether it is in quarantine now."""


def unsound_files(
    root: Path, *, namespace: str | None = None, put_away: bool = False
) -> Iterator[UnsoundFile]:
    """Yield what is no object, in all directories or in that of one namespace.

    With `put_away` each goes to the quarantine first, unless somebody has put something else in its
    place meanwhile. Without it nothing is written, and the directory need not be writable. Raises
    OSError if the store's directory cannot be opened, and `StorageError` where something in it cannot
    be read; what goes away meanwhile is passed over.
    """
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        quarantine = FileQuarantine(root_fd, Turns(root_fd, QUARANTINE)) if put_away else None
        contents = FileContents()
        for path, level in _places(root, root_fd, namespace):
            try:
                found = _look(root_fd, path, level, contents, quarantine)
            except OSError as error:
                raise unreadable(root / path, error) from error
            if found is not None:
                yield found
    finally:
        os.close(root_fd)


def _places(root: Path, root_fd: int, namespace: str | None) -> Iterator[tuple[str, int]]:
    """Yield what is below the objects' directory, with the number of directories that it is below."""
    tops: Iterable[str]
    if namespace is None:
        tops = entries(root, root_fd, OBJECTS)
    else:
        tops = [object_path(namespace, bytes(NAME_DIGEST_BYTES)).rsplit("/", _LEVELS)[0]]
    for top in tops:
        yield top, 0
        for digits in entries(root, root_fd, top):
            yield digits, 1
            for path in entries(root, root_fd, digits):
                yield path, _LEVELS


def _look(
    root_fd: int, path: str, level: int, contents: FileContents, quarantine: FileQuarantine | None
) -> UnsoundFile | None:
    """Return what is wrong with what lies at `path`, None if nothing is."""
    with _opened(root_fd, path, _PLACE) as place:
        if place is None:
            return None
        # It stays open until it is away, so that its inode number stands for it alone.
        status = os.fstat(place)
        is_file = stat.S_ISREG(status.st_mode)
        if level < _LEVELS:
            finding = HeaderFinding.SOUND if stat.S_ISDIR(status.st_mode) else HeaderFinding.KIND
        else:
            finding = _finding(root_fd, path, contents) if is_file else HeaderFinding.KIND
        if finding is HeaderFinding.SOUND:
            return None
        identity = (status.st_dev, status.st_ino) if is_file else None
        away = quarantine is not None and quarantine.put_away(path, identity, finding)
    nbytes = status.st_size if is_file else 0
    mode = status.st_mode
    return UnsoundFile(path=path, finding=finding, mode=mode, nbytes=nbytes, put_away=away)


def _finding(root_fd: int, path: str, contents: FileContents) -> HeaderFinding:
    """Say what is wrong with the header or the name of a regular file."""
    with _opened(root_fd, path, READ_FLAGS) as fd:
        if fd is None:
            # Gone meanwhile, and then nothing of it is in anybody's way.
            return HeaderFinding.SOUND
        said = read_statement(contents.header(fd))
    if isinstance(said, HeaderFinding):
        return said
    digest = name_digest(said.name)
    own = digest is not None and path == object_path(said.name.namespace, digest)
    return HeaderFinding.SOUND if own else HeaderFinding.NAME


@contextmanager
def _opened(root_fd: int, path: str, flags: int) -> Generator[int | None]:
    """Hold what lies at `path` open; None if it is gone. Raises OSError if that cannot be done."""
    try:
        fd = os.open(path, flags, dir_fd=root_fd)
    except OSError as error:
        if error.errno not in GONE:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
