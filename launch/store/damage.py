"""What is damaged in a store, told: by name, by path in a directory, and by what is wrong with it."""

import asyncio
import logging
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...page_format.object_header import HEADER_BYTES, HeaderFinding, check_object
from ...page_format.object_name import ObjectName, name_digest, object_path
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import Read, StorageBackend
from ...storage_backends.file import quarantine as file_quarantine
from ...storage_backends.file.unsound import UnsoundFile, unsound_files
from ...storage_backends.uri import parse_uri
from .batches import OBJECT_BYTES_MAX
from .opening import call_deadline, failures_named, store_directory

CORRUPT_MAX: Final = 10
"""Corrupt objects that are named."""
STRAYS_MAX: Final = 100
"""Files that are named of those that are no objects."""
_REASONS: Final = {
    HeaderFinding.SHORT: "short",
    HeaderFinding.LONG: "long",
    HeaderFinding.MAGIC: "foreign",
    HeaderFinding.HEADER: "header",
    HeaderFinding.VERSION: "version",
    HeaderFinding.NAME: "name",
    HeaderFinding.LENGTH: "length",
    HeaderFinding.PAYLOAD: "payload",
}
_KINDS: Final = {
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}
REASONS_IN_WORDS: Final = {
    "short": "too short",
    "long": "too long",
    "foreign": "not Lockstep's",
    "header": "its header is bad",
    "version": "written by another version",
    "name": "an object in the wrong place",
    "length": "not as long as its layout says",
    "payload": "its payload is bad",
    "file": "a file where a directory should be",
    "link": "a link",
    "directory": "a directory where a file should be",
    "pipe": "a pipe",
    "socket": "a socket",
    "device": "a device",
}
"""What each reason is to a person; the reasons themselves are for machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptObject:
    """An object that is not what its name says."""

    name: ObjectName
    path: Path | None
    """The object's file in a store of files; None in a store of another kind."""
    reason: str | None
    """One of `REASONS_IN_WORDS`; None where only the store knows."""
    put_away: bool
    """Whether it is in the quarantine of a store of files now."""


@dataclass(slots=True)
class Corrupt:
    """Counts the objects that were corrupt, and keeps the first of them."""

    objects: int = 0
    first: list[CorruptObject] = field(default_factory=list[CorruptObject])


@dataclass(slots=True)
class Strays:
    """Files that lie among the objects of a directory and are none of them."""

    files: int = 0
    nbytes: int = 0
    put_away: int = 0
    first: list[UnsoundFile] = field(default_factory=list[UnsoundFile])

    def add(self, found: UnsoundFile) -> None:
        """Count one file more."""
        self.files += 1
        self.nbytes += found.nbytes
        self.put_away += found.put_away
        if len(self.first) < STRAYS_MAX:
            self.first.append(found)


@dataclass(frozen=True, slots=True)
class Examiner:
    """Counts corrupt objects, says what is wrong with the first of them, and has them put away."""

    directory: Path | None
    """The directory of a store of files; None for a store of another kind."""
    fixing: StorageBackend | None
    """The same store, open so that it puts away what it finds; None to leave everything."""
    corrupt: Corrupt

    async def note(self, asked: Sequence[tuple[ObjectName, ObjectShape]]) -> None:
        """Count objects that a read in these shapes has found to be corrupt."""
        for name, shape in asked:
            digest = name_digest(name)
            path = None
            if self.directory is not None and digest is not None:
                path = self.directory / object_path(name.namespace, digest)
            before = None if path is None else _identity(path)
            reason = None
            if path is not None and len(self.corrupt.first) < CORRUPT_MAX:
                # It has to be looked at before it is put away.
                reason = await asyncio.to_thread(_reason, path)
            if self.fixing is not None:
                read = Read(name, (memoryview(bytearray(shape.nbytes)),), shape)
                await self.fixing.read([read], deadline=call_deadline(shape.nbytes))
            self.corrupt.objects += 1
            if len(self.corrupt.first) < CORRUPT_MAX:
                away = path is not None and before is not None and _identity(path) != before
                found = CorruptObject(
                    name=name, path=path, reason=reason, put_away=self.fixing is not None and away
                )
                self.corrupt.first.append(found)


def reason_of(found: UnsoundFile) -> str:
    """Return what is wrong with something that is no object: one of `REASONS_IN_WORDS`."""
    if found.finding is HeaderFinding.KIND:
        return _KINDS.get(stat.S_IFMT(found.mode), "device")
    return _REASONS.get(found.finding, "header")


def quarantine_extent(directory: Path) -> tuple[int, int]:
    """Return how many files the quarantine of a directory has, and their bytes."""
    files = nbytes = 0
    try:
        with os.scandir(directory / "quarantine") as entries:
            for entry in entries:
                files += 1
                nbytes += entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass
    return files, nbytes


def unsound_extent(uri: str) -> tuple[int, int] | None:
    """Return how many files of a store's directory are no objects, and their bytes.

    None for a store of another kind.
    """
    directory = store_directory(parse_uri(uri))
    if directory is None:
        return None
    strays = Strays()
    with failures_named(uri):
        for found in unsound_files(directory):
            strays.add(found)
    return strays.files, strays.nbytes


@contextmanager
def quiet_quarantine() -> Generator[None]:
    """Keep the log of the quarantine off the terminal: what it would say is told as a result."""
    log = logging.getLogger(file_quarantine.__name__)
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _reason(path: Path) -> str | None:
    """Return what is wrong with the file of a corrupt object; None if it is gone. Blocks."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return _KINDS.get(stat.S_IFMT(status.st_mode), "device")
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            raw = file.read(min(status.st_size, HEADER_BYTES + OBJECT_BYTES_MAX + 1))
    except OSError:
        return None
    said = check_object(memoryview(raw))
    # What is sound in itself was not what the layout of its model makes it.
    return _REASONS.get(said, "header") if isinstance(said, HeaderFinding) else "length"
