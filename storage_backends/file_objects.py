"""Objects as files, one each: the blocking half of `file://`, called from several threads.

    <root>/objects/<namespace digest>/<2 digits>/<name digest>     one object
    <root>/quarantine/<place>                                      what was found to be bad
    <root>/temporary/<random>                                      being written (see file_publish)

A file is one block of 4096 bytes, which begins with the header and goes on with zeros, and then the
payload. So the payload is aligned for direct I/O and for the page cache, and since filesystems
store whole blocks, it takes no more room than a short header would. Nothing that a caller says gets
into a path: only digests of it do.
"""

import errno
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np

from .base import ObjectName, ReadOutcome, WriteOutcome
from .file_publish import DIRECTORY_MODE, TEMPORARY, choose_publisher, sweep
from .file_quarantine import QUARANTINE, Quarantine
from .page_object import (
    HEADER_BYTES,
    PIECE_BYTES,
    Finding,
    check_header,
    check_payload,
    encode_header,
    join_checksums,
    name_digest,
    payload_checksum,
    piece_checksum,
)
from .thread_calls import Stop

BLOCK_BYTES: Final = 4096
_OBJECTS: Final = "objects"
_PADDING: Final = bytes(BLOCK_BYTES - HEADER_BYTES)
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE: Final = frozenset({errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.ENODEV})
"""What the kernel answers where there is something under the name that is no regular file."""


class Durability(StrEnum):
    """What a successful write has survived."""

    NONE = "none"
    """The death of the process. After a power failure the object may be missing or found bad."""
    DATA = "data"
    """A power failure, for the bytes; the name may be lost."""
    FULL = "full"
    """A power failure."""


class ObjectFiles:
    """The files of one store. Methods may block; none raises for what goes wrong with a key."""

    def __init__(self, root: Path, durability: Durability, *, direct: bool) -> None:
        self._root = root
        self._durability = durability
        self._direct_flag = os.O_DIRECT if direct else 0
        self._scratch = _Scratch()
        self._root_fd = -1

    def open(self) -> None:
        """Make the directories, sweep what dead writers left, and try a write. Raises OSError."""
        self._root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in (_OBJECTS, QUARANTINE, TEMPORARY):
                self._make_directory(name)
            sweep(self._root_fd)
            self._publisher = choose_publisher(self._root_fd, self._direct_flag)
        except BaseException:
            self.close()
            raise
        self._quarantine = Quarantine(self._root_fd)

    def close(self) -> None:
        """Close the root if it is open. Nobody may use the store after this. Idempotent."""
        root_fd, self._root_fd = self._root_fd, -1
        if root_fd >= 0:
            os.close(root_fd)

    def exists(self, name: ObjectName) -> bool:
        """Say whether there is something under this name."""
        digest = name_digest(name)
        return digest is not None and os.access(
            object_path(name.namespace, digest), os.F_OK, dir_fd=self._root_fd
        )

    def remove(self, name: ObjectName) -> bool:
        """Remove the object; True if the name is free now."""
        digest = name_digest(name)
        if digest is None:
            return False
        path = object_path(name.namespace, digest)
        try:
            os.unlink(path, dir_fd=self._root_fd)
        except FileNotFoundError:
            return True
        except IsADirectoryError:
            return self._quarantine.take(path, None, Finding.KIND)
        except OSError:
            return False
        return True

    def read(self, name: ObjectName, buffer: memoryview, stop: Stop) -> ReadOutcome:
        """Read the object into `buffer` and verify it. What is bad goes to the quarantine."""
        digest = name_digest(name)
        if digest is None:
            return ReadOutcome.FAILED
        if stop.due():
            return ReadOutcome.TIMED_OUT
        path = object_path(name.namespace, digest)
        target = buffer.cast("B")
        direct = self._direct_for(target)
        try:
            fd = os.open(path, _READ_FLAGS | direct, dir_fd=self._root_fd)
        except OSError as error:
            return self._no_read(path, error)
        try:
            finding = self._fill(fd, digest, target, stop, direct=bool(direct))
            if finding is None:
                return ReadOutcome.TIMED_OUT
            if finding is Finding.SOUND:
                return ReadOutcome.OK
            # The file stays open until it is away, so that its inode number stands for it alone.
            status = os.fstat(fd)
            self._quarantine.take(path, (status.st_dev, status.st_ino), finding)
        except OSError as error:
            return self._no_read(path, error)
        finally:
            os.close(fd)
        return ReadOutcome.CORRUPT

    def write(self, name: ObjectName, buffer: memoryview, stop: Stop) -> WriteOutcome:
        """Write the object, unless somebody has. Nothing of it is left if that fails."""
        digest = name_digest(name)
        if digest is None:
            return WriteOutcome.FAILED
        if stop.due():
            return WriteOutcome.TIMED_OUT
        path = object_path(name.namespace, digest)
        payload = buffer.cast("B")
        try:
            if self._present(path, BLOCK_BYTES + payload.nbytes):
                return WriteOutcome.PRESENT
            return self._create(path, digest, payload)
        except OSError:
            return WriteOutcome.FAILED

    def _no_read(self, path: str, error: OSError) -> ReadOutcome:
        if error.errno == errno.ENOENT:
            return ReadOutcome.MISSING
        if error.errno in _NO_FILE:
            self._quarantine.take(path, None, Finding.KIND)
            return ReadOutcome.CORRUPT
        # Direct I/O says only that the call was invalid, whatever is there.
        if error.errno == errno.EINVAL and self._quarantine.take(path, None, Finding.KIND):
            return ReadOutcome.CORRUPT
        return ReadOutcome.FAILED

    def _direct_for(self, payload: memoryview) -> int:
        """Return O_DIRECT if it was asked for and this buffer permits it."""
        if not self._direct_flag or payload.nbytes % BLOCK_BYTES or not payload.nbytes:
            return 0
        address: int = np.frombuffer(payload, dtype=np.uint8).__array_interface__["data"][0]
        return 0 if address % BLOCK_BYTES else self._direct_flag

    def _fill(
        self, fd: int, digest: bytes, target: memoryview, stop: Stop, *, direct: bool
    ) -> Finding | None:
        """Read and check the file; None if it had to stop on the way."""
        size = target.nbytes
        block, tail = self._scratch.block, self._scratch.tail if direct else self._scratch.byte
        # Direct reads are bound by the device and not by the cache, so they go in one piece.
        step = size if direct else PIECE_BYTES
        views = [block, target[:step], tail] if size <= step else [block, target[:step]]
        needed = BLOCK_BYTES + min(step, size)
        got = _read_fully(fd, views, 0, needed, direct=direct)
        if got < BLOCK_BYTES:
            return Finding.SHORT
        finding = check_header(block[:HEADER_BYTES], digest, size)
        if finding is not Finding.SOUND:
            return finding
        if bytes(block[HEADER_BYTES:]) != _PADDING:
            return Finding.HEADER
        if size <= step:
            if got != needed:
                return Finding.SHORT if got < needed else Finding.LONG
            return check_payload(block, payload_checksum(target))
        if got < needed:
            return Finding.SHORT
        checksums = [piece_checksum(target[:step])]
        for start in range(step, size, step):
            if stop.due():
                return None
            piece = target[start : start + step]
            views = [piece] if start + step < size else [piece, tail]
            got = _read_fully(fd, views, BLOCK_BYTES + start, piece.nbytes, direct=direct)
            if got != piece.nbytes:
                return Finding.SHORT if got < piece.nbytes else Finding.LONG
            checksums.append(piece_checksum(piece))
        return check_payload(block, join_checksums(checksums))

    def _present(self, path: str, size: int) -> bool:
        """Say whether there is an object; what cannot be one is taken away, if that works.

        Where it stays, publishing finds the name taken.
        """
        try:
            status = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return _may_be_object(status, size) or not self._take_away(path, size)

    def _take_away(self, path: str, size: int) -> bool:
        """Take away what cannot be the object; False if by now there is what can be."""
        try:
            fd = os.open(path, _READ_FLAGS, dir_fd=self._root_fd)
        except OSError as error:
            if error.errno in _NO_FILE:
                self._quarantine.take(path, None, Finding.KIND)
            return True
        try:
            status = os.fstat(fd)
            # Another process may have put the object here since the name was looked at; a file that
            # is open is never changed into another.
            if _may_be_object(status, size):
                return False
            if not stat.S_ISREG(status.st_mode):
                self._quarantine.take(path, None, Finding.KIND)
            else:
                finding = Finding.SHORT if status.st_size < size else Finding.LONG
                self._quarantine.take(path, (status.st_dev, status.st_ino), finding)
        finally:
            os.close(fd)
        return True

    def _create(self, path: str, digest: bytes, payload: memoryview) -> WriteOutcome:
        directory = path.rpartition("/")[0]
        direct = self._direct_for(payload)
        try:
            draft = self._publisher.draft(directory, direct)
        except FileNotFoundError:
            # Mostly only the last two are new, but somebody may have emptied the store.
            for each in (_OBJECTS, TEMPORARY, directory.rpartition("/")[0], directory):
                self._make_directory(each)
            draft = self._publisher.draft(directory, direct)
        try:
            header = encode_header(digest, payload.nbytes, payload_checksum(payload))
            self._write_fully(draft.fd, header, payload, direct=bool(direct))
            if self._durability is Durability.DATA:
                os.fdatasync(draft.fd)
            elif self._durability is Durability.FULL:
                os.fsync(draft.fd)
            if not draft.publish(path):
                return WriteOutcome.PRESENT
        finally:
            draft.close()
        if self._durability is Durability.FULL:
            self._sync_directory(directory)
        return WriteOutcome.OK

    def _write_fully(self, fd: int, header: bytes, payload: memoryview, *, direct: bool) -> None:
        views: list[memoryview | bytes] = [header, _PADDING, payload]
        if direct:
            block = self._scratch.block
            block[:HEADER_BYTES] = header
            block[HEADER_BYTES:] = _PADDING
            views = [block, payload]
        size = BLOCK_BYTES + payload.nbytes
        done = os.pwritev(fd, views, 0)
        while done < size:
            count = os.pwritev(fd, _skip(views, done), done)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count

    def _make_directory(self, path: str) -> None:
        try:
            os.mkdir(path, DIRECTORY_MODE, dir_fd=self._root_fd)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(path, dir_fd=self._root_fd).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
            return
        if self._durability is Durability.FULL:
            self._sync_directory(path.rpartition("/")[0] or ".")

    def _sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root_fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _Scratch(threading.local):
    """Each thread's own aligned memory for a header block and for what follows a payload."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
        self.block = memory[:BLOCK_BYTES]
        self.tail = memory[BLOCK_BYTES:]
        self.byte = self.tail[:1]


def _may_be_object(status: os.stat_result, size: int) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size == size


@lru_cache(maxsize=1024)
def _namespace_directory(namespace: str) -> str:
    return f"{_OBJECTS}/{blake2b(namespace.encode('ascii'), digest_size=16).hexdigest()}"


def object_path(namespace: str, digest: bytes) -> str:
    """Return where, below the root, the object with this `name_digest` lies."""
    digits = digest.hex()
    return f"{_namespace_directory(namespace)}/{digits[:2]}/{digits}"


def _read_fully(
    fd: int, views: Sequence[memoryview], offset: int, needed: int, *, direct: bool
) -> int:
    """Fill `views` from `offset` until `needed` bytes are there or the file ends.

    A regular file gives all there is in one call, also the byte behind `needed` that must not be.
    """
    got = os.preadv(fd, views, offset)
    while got < needed:
        # Direct I/O ends off a block only at the end of the file, and cannot go on from there.
        if direct and got % BLOCK_BYTES:
            break
        count = os.preadv(fd, _skip(views, got), offset + got)
        if count == 0:
            break
        got += count
    return got


def _skip(views: Sequence[memoryview | bytes], count: int) -> list[memoryview | bytes]:
    """Return `views` without their first `count` bytes."""
    rest: list[memoryview | bytes] = []
    for view in views:
        skipped = min(count, len(view))
        count -= skipped
        if skipped < len(view):
            rest.append(memoryview(view)[skipped:])
    return rest
