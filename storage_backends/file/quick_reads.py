"""The fast path for reads of whole objects, which does as little as possible between system calls.

Between system calls a thread holds the interpreter lock and blocks all other threads, the engine's too.
Waiting for the lock after a system call takes longer than the work between two calls. So paths are
computed before the first file of a group is opened, and headers are checked after the last one is
closed. In between, each file is opened, read in one call, closed and hashed.

If a file or its header is not as expected, the normal path reads it again and finds the reason.
"""

import os
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from ...page_format.object_header import HEADER_BYTES, PIECE_BYTES, ExpectedHeader, part_checksum
from ...page_format.object_name import located
from ..base import Read, ReadOutcome
from ..threaded_backend import Stop
from .listing import READ_FLAGS
from .trust import OwnDirectories

_GROUP_PAGES: Final = 64
"""Number of pages that are read before their headers are checked. With more pages, the first headers
would no longer be in the core's cache when they are checked."""
_PAYLOAD_BYTES_MAX: Final = 1 << 20
"""Maximum payload bytes of the fast path. Larger payloads take the normal path, which reads in pieces:
each piece is hashed while it is in the core's cache, and the read can stop soon after its deadline."""

ReadOne = Callable[[Read, Stop], ReadOutcome]


class _File(NamedTuple):
    """A file to read on the fast path, which must contain exactly the requested parts."""

    at: int
    """Index of the read in its group of reads."""
    digest: bytes
    path: str
    target: memoryview
    parts: list[memoryview]
    """For each part of the object, the memory that it is read into. Each part has its own checksum."""


class _Found(NamedTuple):
    """Result of reading one file: the number of bytes read, the header, and a checksum per part."""

    file: _File
    nbytes: int
    header: bytes
    checksums: list[bytes]


class QuickReads:
    """Reads groups of objects on one thread, by the fast path if possible."""

    def __init__(self, root_fd: int, own: OwnDirectories) -> None:
        self._root_fd = root_fd
        self._own = own

    def read(self, reads: Sequence[Read], stop: Stop, otherwise: ReadOne) -> list[ReadOutcome]:
        """Return the outcome of each read; call `otherwise` for reads that fail on the fast path."""
        outcomes: list[ReadOutcome] = []
        for start in range(0, len(reads), _GROUP_PAGES):
            for _, alike in groupby(reads[start : start + _GROUP_PAGES], _shape_of):
                group = list(alike)
                sound = self._read_alike(group, stop)
                for at, read in enumerate(group):
                    outcomes.append(ReadOutcome.OK if at in sound else otherwise(read, stop))
        return outcomes

    def _read_alike(self, group: Sequence[Read], stop: Stop) -> set[int]:
        """Read objects of one shape; return the indices of those whose buffers hold verified bytes."""
        expected = ExpectedHeader(group[0].shape)
        if not expected.is_one_run or not 0 < expected.payload_bytes <= _PAYLOAD_BYTES_MAX:
            return set()
        files = self._files(group, expected)
        whole = HEADER_BYTES + expected.payload_bytes
        return {
            file.at
            for file, nbytes, header, checksums in _read_files(self._root_fd, files, stop)
            if nbytes == whole
            and expected.fits(header, file.digest)
            and expected.stated(header) == b"".join(checksums)
        }

    def _files(self, group: Sequence[Read], expected: ExpectedHeader) -> list[_File]:
        """Return a `_File` for each object that one system call can read."""
        files: list[_File] = []
        for at, (name, buffers, _) in enumerate(group):
            place = located(name)
            if place is None or len(buffers) != 1:
                continue
            (digest, path), (target,) = place, buffers
            if not _is_plain(target, expected.payload_bytes):
                continue
            if self._own.foreign(self._root_fd, path) is None:
                files.append(_File(at, digest, path, target, expected.parts_of(target)))
        return files


def _read_files(root_fd: int, files: Sequence[_File], stop: Stop) -> list[_Found]:
    """Open, read and hash the files one after the other until `stop` is due.

    Returns the results of the files that could be opened and read.
    """
    header, beyond = bytearray(HEADER_BYTES), bytearray(1)
    found: list[_Found] = []
    # Copy functions to local variables, because each page read evicts the modules' attribute tables
    # from the core's cache.
    open_, preadv, close, checksum, due = os.open, os.preadv, os.close, part_checksum, stop.due
    for file in files:
        _, _, path, target, parts = file
        if due():
            break
        try:
            fd = open_(path, READ_FLAGS, dir_fd=root_fd)
        except OSError:
            continue
        try:
            nbytes = preadv(fd, (header, target, beyond), 0)
        except OSError:
            continue
        finally:
            close(fd)
        # If the deadline has passed, do not spend more time on hashing a long payload here. Leave
        # the file to the normal path, which checks the deadline between two pieces.
        if len(target) > PIECE_BYTES and due():
            break
        found.append(_Found(file, nbytes, bytes(header), [checksum(part) for part in parts]))
    return found


def _shape_of(read: Read) -> int:
    """Return the identity of the read's shape, by which reads are grouped.

    The identity is enough, because all reads of a pool share one shape object.
    """
    return id(read.shape)


def _is_plain(buffer: memoryview, nbytes: int) -> bool:
    """Return whether a buffer is `nbytes` contiguous, writable bytes."""
    try:
        return (
            buffer.nbytes == nbytes
            and buffer.itemsize == 1
            and buffer.ndim == 1
            and buffer.c_contiguous
            and not buffer.readonly
        )
    except ValueError:
        # Return False if the memory was released: the view's properties then raise ValueError.
        return False
