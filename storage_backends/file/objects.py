"""Blocking file operations of `file://`, called from several threads: one file per object.

    <root>/objects/<namespace digest>/<2 digits>/<name digest>     one object
    <root>/quarantine/<number>                                     a corrupt file
    <root>/temporary/<random>                                      a file being written (see `publish`)

`contents` defines the format of a file, and `publish` how a file gets its name. Paths contain only
digests of the caller's names, never the names.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from ...page_format.object_header import HeaderFinding
from ...page_format.object_name import OBJECTS, ObjectName, located
from ...page_format.object_shape import ObjectShape
from ..base import After, Read, ReadOutcome, StoredObject, WriteOutcome
from ..buffers import address_of, fitting
from ..error_log import ErrorLog
from ..threaded_backend import Stop
from .contents import BLOCK_BYTES, FileContents
from .listing import READ_FLAGS, entries, stored_as, unreadable
from .publish import DIRECTORY_MODE, TEMPORARY, Draft, choose_draft, sweep
from .quarantine import QUARANTINE, FileQuarantine
from .quick_reads import QuickReads
from .sweep import SweepLimits
from .sweeper import Sweeper
from .trust import BELOW, OwnDirectories, Trust, check_trust
from .uses import UseTimes
from .write_lock_slots import Identity, WriteLockSlots

_WRITE_TRIES: Final = 256
"""Maximum number of attempts of one write; an attempt fails only if another writer interfered."""
_NO_FILE: Final = frozenset({errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.ENODEV})
"""The errnos of system calls on a path that is not a regular file."""


class Durability(StrEnum):
    """The failures (of the process, of the machine) that a write survives once it is reported as OK."""

    NONE = "none"
    """A write survives the death of the process. After a power failure the object may be missing or
    corrupt."""
    DATA = "data"
    """The bytes of a write survive a power failure, but the file's directory entry may be lost."""
    FULL = "full"
    """A write survives a power failure, directory entry included."""


class _New(NamedTuple):
    """An object to be written, with the digest of its name and the path of its file."""

    name: ObjectName
    digest: bytes
    path: str
    buffers: list[memoryview]
    shape: ObjectShape


class ObjectFiles:
    """The object files of one store. Methods may block; a failure of one key never raises."""

    def __init__(
        self,
        root: Path,
        durability: Durability,
        *,
        direct: bool,
        trust: Trust = Trust.OWNER,
        text: str = "",
    ) -> None:
        self._root = root
        self._complaints = ErrorLog(text or f"file://{root}")
        self._trust = trust
        self._own = OwnDirectories()
        self._durability = durability
        self._direct_flag = os.O_DIRECT if direct else 0
        self._contents = FileContents()
        self._root_fd = -1

    def open(self) -> None:
        """Create the directories, remove the temporary files of dead writers, and try a write.

        Raises `ConfigError`, before anything is created, if untrusted users can write to the directory.
        Raises OSError if a step fails.
        """
        self._root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            check_trust(self._root, self._root_fd, self._trust)
            for name in BELOW:
                self._make_directory(name)
            # Check again, because in a sticky root (such as /tmp) another user may have created the
            # directories first.
            check_trust(self._root, self._root_fd, self._trust)
            sweep(self._root_fd)
            self._make_draft = choose_draft(self._root_fd, self._direct_flag)
        except BaseException:
            self.close()
            raise
        self._turns = WriteLockSlots(self._root_fd, QUARANTINE)
        self._quarantine = FileQuarantine(self._root_fd, self._turns)

    def sweeper(self, limits: SweepLimits) -> Sweeper:
        """Return a thread that keeps this store within its limits. The store must be open."""
        return Sweeper(self._root_fd, limits)

    def use_times(self, after: After | None) -> UseTimes:
        """Return a `UseTimes` for the files of one call; `after` precedes its first object."""
        return UseTimes(self._root_fd, after)

    def close(self) -> None:
        """Close the root directory if it is open; the store is unusable afterwards. Idempotent."""
        root_fd, self._root_fd = self._root_fd, -1
        if root_fd >= 0:
            os.close(root_fd)

    def exists(self, name: ObjectName) -> bool:
        """Return whether the object's path exists; the file there may be invalid."""
        place = located(name)
        return place is not None and os.access(place[1], os.F_OK, dir_fd=self._root_fd)

    def remove(self, name: ObjectName, stop: Stop | None = None) -> bool:
        """Remove the object's file; return whether no file has its path now."""
        place = located(name)
        if place is None:
            return False
        path = place[1]
        if not self._is_within(path, stop):
            return True
        try:
            os.unlink(path, dir_fd=self._root_fd)
        except FileNotFoundError:
            return True
        except IsADirectoryError:
            return self._quarantine.move_to_quarantine(path, None, HeaderFinding.KIND, stop)
        except OSError:
            return False
        return True

    def read_all(self, reads: Sequence[Read], stop: Stop) -> list[ReadOutcome]:
        """Read objects one after the other; return one outcome per read."""
        if self._direct_flag:
            return [self.read(each, stop) for each in reads]
        return QuickReads(self._root_fd, self._own).read(reads, stop, self.read)

    def read(self, read: Read, stop: Stop) -> ReadOutcome:
        """Read the object into its buffers and verify it.

        A corrupt file is moved to the quarantine directory.
        """
        name, buffers, shape = read
        place = located(name)
        if place is None:
            return ReadOutcome.FAILED
        digest, path = place
        if stop.due():
            return ReadOutcome.TIMED_OUT
        targets = fitting(buffers, shape.nbytes, writable=True)
        if targets is None:
            return ReadOutcome.FAILED
        if not self._is_within(path, stop):
            return ReadOutcome.CORRUPT
        direct = self._direct_for(targets, shape)
        try:
            fd = os.open(path, READ_FLAGS | direct, dir_fd=self._root_fd)
        except OSError as error:
            return self._no_read(path, error, stop)
        try:
            finding = self._contents.read(fd, digest, targets, shape, stop, direct=bool(direct))
            if finding is HeaderFinding.SOUND:
                return ReadOutcome.OK
            if finding is None:
                return ReadOutcome.TIMED_OUT
            if finding is HeaderFinding.LACKING:
                return ReadOutcome.LACKING
            # Keep the file open until it has been moved. Otherwise a new file could get its inode
            # number and be moved instead.
            self._quarantine.move_to_quarantine(path, _identity(os.fstat(fd)), finding, stop)
        except OSError as error:
            return self._no_read(path, error, stop)
        finally:
            os.close(fd)
        return ReadOutcome.CORRUPT

    def write(
        self, name: ObjectName, buffers: Sequence[memoryview], shape: ObjectShape, stop: Stop
    ) -> WriteOutcome:
        """Write the object unless it exists. A failed write leaves no file behind.

        If the existing object lacks a column of the new one, it is replaced by an object with the
        columns of both.
        """
        place = located(name)
        views = fitting(buffers, shape.nbytes)
        if place is None or views is None:
            return WriteOutcome.FAILED
        new = _New(name, *place, views, shape)
        failure: OSError | None = None
        for _ in range(_WRITE_TRIES):
            if stop.due():
                return WriteOutcome.TIMED_OUT
            try:
                outcome = self._try_to_write(new, stop)
                if outcome is not None:
                    return outcome
            except OSError as error:
                failure = error
                # Try again: a sweep, possibly by another host, removed the empty directory before the
                # file was created.
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    break
        if stop.due():
            return WriteOutcome.TIMED_OUT
        if failure is not None:
            self._complaints.log_failure("a page could not be written", failure.errno)
        return WriteOutcome.FAILED

    def names(self) -> Iterator[StoredObject]:
        """Yield the stored objects that have a valid header and a path that matches their name.

        Ages are relative to the start of the listing, so sorting by age sorts by last use. Raises
        `StorageError` if a file or directory exists but cannot be read.
        """
        now, root, root_fd = time.time(), self._root, self._root_fd
        for namespace in entries(root, root_fd, OBJECTS):
            for digits in entries(root, root_fd, namespace):
                for path in entries(root, root_fd, digits):
                    try:
                        stored = stored_as(root_fd, path, self._contents, now)
                    except OSError as error:
                        raise unreadable(root / path, error) from error
                    place = None if stored is None else located(stored.name)
                    if stored is not None and place is not None and path == place[1]:
                        yield stored

    def _is_within(self, path: str, stop: Stop | None) -> bool:
        """Return whether an object's path lies in the store: no directory on it is a link or file.

        A link or file in place of a directory is moved to the quarantine.
        """
        foreign = self._own.foreign(self._root_fd, path)
        if foreign is not None:
            self._quarantine.move_to_quarantine(foreign, None, HeaderFinding.KIND, stop)
        return foreign is None

    def _no_read(self, path: str, error: OSError, stop: Stop) -> ReadOutcome:
        if error.errno == errno.ENOENT:
            return ReadOutcome.MISSING
        if error.errno in _NO_FILE:
            self._quarantine.move_to_quarantine(path, None, HeaderFinding.KIND, stop)
            return ReadOutcome.CORRUPT
        # Treat EINVAL as corruption if the path is not a regular file, because direct I/O reports
        # EINVAL for such paths.
        if error.errno == errno.EINVAL and self._quarantine.move_to_quarantine(
            path, None, HeaderFinding.KIND, stop
        ):
            return ReadOutcome.CORRUPT
        return ReadOutcome.FAILED

    def _direct_for(self, buffers: Sequence[memoryview], shape: ObjectShape) -> int:
        """Return O_DIRECT if these buffers permit it and the store uses it, otherwise 0.

        The buffers permit direct I/O if a single aligned buffer contains the whole payload.
        """
        if not self._direct_flag or len(buffers) != 1 or not shape.is_whole:
            return 0
        payload = buffers[0]
        if payload.nbytes % BLOCK_BYTES or not payload.nbytes:
            return 0
        return 0 if address_of(payload) % BLOCK_BYTES else self._direct_flag

    def _try_to_write(self, new: _New, stop: Stop) -> WriteOutcome | None:
        """Try once to write the object unless it exists; return None if another writer interfered."""
        if not self._is_within(new.path, stop):
            return None
        # Test with `access` first: usually no file exists, and `access` reports that without the cost
        # of an exception.
        if not os.access(new.path, os.F_OK, dir_fd=self._root_fd, follow_symlinks=False):
            return WriteOutcome.OK if self._store(new, None, stop) else None
        status = os.stat(new.path, dir_fd=self._root_fd, follow_symlinks=False)
        # Return early, after one `stat` call, if the file's length alone shows that the stored object
        # has exactly the columns to be written.
        if _may_be_object(status, new):
            return WriteOutcome.PRESENT
        try:
            fd = os.open(new.path, READ_FLAGS, dir_fd=self._root_fd)
        except OSError as error:
            if error.errno in _NO_FILE:
                self._quarantine.move_to_quarantine(new.path, None, HeaderFinding.KIND, stop)
            elif error.errno != errno.ENOENT:
                raise
            return None
        try:
            return self._write_beside(fd, new, stop)
        finally:
            os.close(fd)

    def _write_beside(self, fd: int, new: _New, stop: Stop) -> WriteOutcome | None:
        """Replace the object in the open file `fd`, unless that object has all columns of the new one.

        Moves the file to the quarantine directory if it is corrupt. Returns None if another attempt is
        needed. `fd` stays open, so that no new file can get the old file's inode number.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            self._quarantine.move_to_quarantine(new.path, None, HeaderFinding.KIND, stop)
            return None
        if _may_be_object(status, new):
            return WriteOutcome.PRESENT
        finding, present = self._contents.look(fd, new.digest, new.shape)
        if finding is HeaderFinding.SOUND:
            return WriteOutcome.PRESENT
        if finding is HeaderFinding.LACKING:
            if present & ~new.shape.present:
                united = self._contents.unite(fd, new.buffers, new.shape, present, stop)
                if united is None:
                    if not stop.due():
                        self._quarantine.move_to_quarantine(
                            new.path, _identity(status), HeaderFinding.PAYLOAD, stop
                        )
                    return None
                new = new._replace(buffers=[united], shape=new.shape.with_columns(present))
            return WriteOutcome.OK if self._store(new, _identity(status), stop) else None
        self._quarantine.move_to_quarantine(new.path, _identity(status), finding, stop)
        return None

    def _store(self, new: _New, standing: Identity | None, stop: Stop) -> bool:
        """Write a new file under the object's path.

        If `standing` is None the path must be free. Otherwise the new file replaces the file with this
        identity. Returns False, and leaves no file behind, if another file has the path or `stop` was
        due.
        """
        path = new.path
        directory = path.rpartition("/")[0]
        direct = self._direct_for(new.buffers, new.shape)
        draft = self._draft(directory, direct)
        try:
            what = (draft.fd, new.name, new.digest, new.buffers, new.shape)
            if not self._contents.write(*what, stop=stop, direct=bool(direct)):
                return False
            if self._durability is Durability.DATA:
                os.fdatasync(draft.fd)
            elif self._durability is Durability.FULL:
                os.fsync(draft.fd)
            if standing is None:
                named = draft.publish(path)
            else:
                with self._turns.on(path, standing, stop) as named:
                    if named:
                        draft.replace(path)
        finally:
            draft.close()
        if named and self._durability is Durability.FULL:
            self._sync_directory(directory)
        return named

    def _draft(self, directory: str, direct: int) -> Draft:
        try:
            return self._make_draft(self._root_fd, directory, direct)
        except FileNotFoundError:
            # Create the missing directories; usually only the last two are missing, but another process
            # may have removed them all.
            for each in (OBJECTS, TEMPORARY, directory.rpartition("/")[0], directory):
                self._make_directory(each)
            return self._make_draft(self._root_fd, directory, direct)

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


def _may_be_object(status: os.stat_result, new: _New) -> bool:
    """Return whether a file's length shows that its object, if valid, has the columns of `new`."""
    length_suffices = new.shape.known_by_length and stat.S_ISREG(status.st_mode)
    return length_suffices and status.st_size == BLOCK_BYTES + new.shape.nbytes
