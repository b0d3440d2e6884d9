"""Objects as files, one each: the blocking half of `file://`, called from several threads.

    <root>/objects/<namespace digest>/<2 digits>/<name digest>     one object
    <root>/quarantine/<place>                                      what was found to be bad
    <root>/temporary/<random>                                      being written (see file_publish)

What is in a file is told in `file_contents`, and how it gets its name in `file_publish`. Nothing that
a caller says gets into a path: only digests of it do.
"""

import errno
import os
import stat
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np

from .base import ObjectName, ReadOutcome, WriteOutcome
from .file_contents import BLOCK_BYTES, FileContents
from .file_publish import DIRECTORY_MODE, TEMPORARY, Draft, choose_publisher, sweep
from .file_quarantine import QUARANTINE, Quarantine
from .file_turns import Identity, Turns
from .optional_columns import NONE_OPTIONAL, OptionalColumns
from .page_object import Finding, name_digest
from .thread_calls import Stop

_OBJECTS: Final = "objects"
_WRITE_TRIES: Final = 8
"""Each try loses only to somebody else who has changed what is there."""
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
        self._contents = FileContents()
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
        self._turns = Turns(self._root_fd, QUARANTINE)
        self._quarantine = Quarantine(self._root_fd, self._turns)

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

    def read(
        self,
        name: ObjectName,
        buffer: memoryview,
        stop: Stop,
        optional: OptionalColumns = NONE_OPTIONAL,
    ) -> ReadOutcome:
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
            finding = self._contents.read(fd, digest, target, optional, stop, direct=bool(direct))
            match finding:
                case None:
                    return ReadOutcome.TIMED_OUT
                case Finding.SOUND:
                    return ReadOutcome.OK
                case Finding.LACKING:
                    return ReadOutcome.LACKING
                case _:
                    # The file stays open until it is away, so that its inode number stands for it
                    # alone.
                    self._quarantine.take(path, _identity(os.fstat(fd)), finding)
        except OSError as error:
            return self._no_read(path, error)
        finally:
            os.close(fd)
        return ReadOutcome.CORRUPT

    def write(
        self,
        name: ObjectName,
        buffer: memoryview,
        stop: Stop,
        optional: OptionalColumns = NONE_OPTIONAL,
    ) -> WriteOutcome:
        """Write the object, unless somebody has. Nothing of it is left if that fails.

        An object that lacks a column of this one is replaced by one that has the columns of both.
        """
        digest = name_digest(name)
        if digest is None:
            return WriteOutcome.FAILED
        path = object_path(name.namespace, digest)
        payload = buffer.cast("B")
        try:
            for _ in range(_WRITE_TRIES):
                if stop.due():
                    return WriteOutcome.TIMED_OUT
                outcome = self._try_to_write(path, digest, payload, optional)
                if outcome is not None:
                    return outcome
        except OSError:
            pass
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

    def _try_to_write(
        self, path: str, digest: bytes, payload: memoryview, optional: OptionalColumns
    ) -> WriteOutcome | None:
        """Write the object as far as what stands there asks for it; None if that has changed."""
        size = BLOCK_BYTES + payload.nbytes
        try:
            status = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            created = self._store(path, digest, payload, optional.present, None)
            return WriteOutcome.OK if created else None
        # Nearly always the length tells that it is the very object, at the price of one call.
        if optional.told_by_length and _may_be_object(status, size):
            return WriteOutcome.PRESENT
        try:
            fd = os.open(path, _READ_FLAGS, dir_fd=self._root_fd)
        except OSError as error:
            if error.errno in _NO_FILE:
                self._quarantine.take(path, None, Finding.KIND)
            elif error.errno != errno.ENOENT:
                raise
            return None
        try:
            return self._write_beside(fd, path, digest, payload, optional)
        finally:
            os.close(fd)

    def _write_beside(
        self, fd: int, path: str, digest: bytes, payload: memoryview, optional: OptionalColumns
    ) -> WriteOutcome | None:
        """Write the object beside the file `fd`, which stays open so that its identity is its own."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            self._quarantine.take(path, None, Finding.KIND)
            return None
        if optional.told_by_length and _may_be_object(status, BLOCK_BYTES + payload.nbytes):
            return WriteOutcome.PRESENT
        finding, present = self._contents.look(fd, digest, payload.nbytes, optional)
        if finding in (Finding.SOUND, Finding.FULLER):
            return WriteOutcome.PRESENT
        if finding is Finding.LACKING:
            union = optional.present | present
            if union != optional.present:
                united = self._contents.unite(fd, payload, optional, present)
                if united is None:
                    self._quarantine.take(path, _identity(status), Finding.PAYLOAD)
                    return None
                payload = united
            stored = self._store(path, digest, payload, union, _identity(status))
            return WriteOutcome.OK if stored else None
        self._quarantine.take(path, _identity(status), finding)
        return None

    def _store(
        self,
        path: str,
        digest: bytes,
        payload: memoryview,
        present: int,
        standing: Identity | None,
    ) -> bool:
        """Write a new file and give it the name, which is free or that of the file `standing`.

        False if that is so no more.
        """
        directory = path.rpartition("/")[0]
        direct = self._direct_for(payload)
        draft = self._draft(directory, direct)
        try:
            self._contents.write(draft.fd, digest, payload, present, direct=bool(direct))
            if self._durability is Durability.DATA:
                os.fdatasync(draft.fd)
            elif self._durability is Durability.FULL:
                os.fsync(draft.fd)
            if standing is None:
                named = draft.publish(path)
            else:
                with self._turns.on(path, standing) as named:
                    if named:
                        draft.replace(path)
        finally:
            draft.close()
        if named and self._durability is Durability.FULL:
            self._sync_directory(directory)
        return named

    def _draft(self, directory: str, direct: int) -> Draft:
        try:
            return self._publisher.draft(directory, direct)
        except FileNotFoundError:
            # Mostly only the last two are new, but somebody may have emptied the store.
            for each in (_OBJECTS, TEMPORARY, directory.rpartition("/")[0], directory):
                self._make_directory(each)
            return self._publisher.draft(directory, direct)

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


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _may_be_object(status: os.stat_result, size: int) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size == size


@lru_cache(maxsize=1024)
def _namespace_directory(namespace: str) -> str:
    return f"{_OBJECTS}/{blake2b(namespace.encode('ascii'), digest_size=16).hexdigest()}"


def object_path(namespace: str, digest: bytes) -> str:
    """Return where, below the root, the object with this `name_digest` lies."""
    digits = digest.hex()
    return f"{_namespace_directory(namespace)}/{digits[:2]}/{digits}"
