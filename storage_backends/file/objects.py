"""Objects as files, one each: the blocking half of `file://`, called from several threads.

    <root>/objects/<namespace digest>/<2 digits>/<name digest>     one object
    <root>/quarantine/<place>                                      what was found to be bad
    <root>/temporary/<random>                                      being written (see `publish`)

What is in a file is told in `contents`, and how it gets its name in `publish`. Nothing that
a caller says gets into a path: only digests of it do.
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
from ..complaints import Complaints
from ..threaded_backend import Stop
from .contents import BLOCK_BYTES, FileContents
from .listing import READ_FLAGS, entries, stored_as, unreadable
from .publish import DIRECTORY_MODE, TEMPORARY, Draft, choose_draft, sweep
from .quarantine import QUARANTINE, FileQuarantine
from .quick_reads import QuickReads
from .sweep import SweepLimits
from .sweeper import Sweeper
from .trust import BELOW, OwnDirectories, Trust, check_trust
from .turns import Identity, Turns
from .uses import UseTimes

_WRITE_TRIES: Final = 256
"""Each try loses only to somebody else who has changed what is there."""
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


class _New(NamedTuple):
    """An object that is to be written."""

    name: ObjectName
    digest: bytes
    path: str
    buffers: list[memoryview]
    shape: ObjectShape


class ObjectFiles:
    """The files of one store. Methods may block; none raises for what goes wrong with a key."""

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
        self._complaints = Complaints(text or f"file://{root}")
        self._trust = trust
        self._own = OwnDirectories()
        self._durability = durability
        self._direct_flag = os.O_DIRECT if direct else 0
        self._contents = FileContents()
        self._root_fd = -1

    def open(self) -> None:
        """Make the directories, sweep what dead writers left, and try a write.

        Raises OSError, and `ConfigError` where others than are trusted can write; nothing is made then.
        """
        self._root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            check_trust(self._root, self._root_fd, self._trust)
            for name in BELOW:
                self._make_directory(name)
            # In a sticky root somebody else may have been quicker.
            check_trust(self._root, self._root_fd, self._trust)
            sweep(self._root_fd)
            self._make_draft = choose_draft(self._root_fd, self._direct_flag)
        except BaseException:
            self.close()
            raise
        self._turns = Turns(self._root_fd, QUARANTINE)
        self._quarantine = FileQuarantine(self._root_fd, self._turns)

    def sweeper(self, limits: SweepLimits) -> Sweeper:
        """Return a sweeper of this store, which is open."""
        return Sweeper(self._root_fd, limits)

    def use_times(self, after: After | None) -> UseTimes:
        """Return what sets the times of neighbouring objects, the first of which continues `after`."""
        return UseTimes(self._root_fd, after)

    def close(self) -> None:
        """Close the root if it is open. Nobody may use the store after this. Idempotent."""
        root_fd, self._root_fd = self._root_fd, -1
        if root_fd >= 0:
            os.close(root_fd)

    def exists(self, name: ObjectName) -> bool:
        """Say whether there is something under this name."""
        place = located(name)
        return place is not None and os.access(place[1], os.F_OK, dir_fd=self._root_fd)

    def remove(self, name: ObjectName, stop: Stop | None = None) -> bool:
        """Remove the object; True if the name is free now."""
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
            return self._quarantine.put_away(path, None, HeaderFinding.KIND, stop)
        except OSError:
            return False
        return True

    def read_all(self, reads: Sequence[Read], stop: Stop) -> list[ReadOutcome]:
        """Read objects one after the other, as `read` does."""
        if self._direct_flag:
            return [self.read(each, stop) for each in reads]
        return QuickReads(self._root_fd, self._own).read(reads, stop, self.read)

    def read(self, read: Read, stop: Stop) -> ReadOutcome:
        """Read the object into its buffers and verify it. What is bad goes to the quarantine."""
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
            # The file stays open until it is away, so that its inode number stands for it alone.
            self._quarantine.put_away(path, _identity(os.fstat(fd)), finding, stop)
        except OSError as error:
            return self._no_read(path, error, stop)
        finally:
            os.close(fd)
        return ReadOutcome.CORRUPT

    def write(
        self, name: ObjectName, buffers: Sequence[memoryview], shape: ObjectShape, stop: Stop
    ) -> WriteOutcome:
        """Write the object, unless somebody has. Nothing of it is left if that fails.

        An object that lacks a column of this one is replaced by one that has the columns of both.
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
                # A directory that was emptied and swept meanwhile, here or by another host.
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    break
        if stop.due():
            return WriteOutcome.TIMED_OUT
        if failure is not None:
            self._complaints.say_failed("a page could not be written", failure.errno)
        return WriteOutcome.FAILED

    def names(self) -> Iterator[StoredObject]:
        """Yield what is stored, as far as its header is sound and it is where its name leads.

        Ages are as of the beginning, so that they put all objects in the order of their use. Raises
        `StorageError` where something is there and cannot be read.
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
        """Say whether the directories of an object are the store's own; a link among them goes."""
        foreign = self._own.foreign(self._root_fd, path)
        if foreign is not None:
            self._quarantine.put_away(foreign, None, HeaderFinding.KIND, stop)
        return foreign is None

    def _no_read(self, path: str, error: OSError, stop: Stop) -> ReadOutcome:
        if error.errno == errno.ENOENT:
            return ReadOutcome.MISSING
        if error.errno in _NO_FILE:
            self._quarantine.put_away(path, None, HeaderFinding.KIND, stop)
            return ReadOutcome.CORRUPT
        # Direct I/O says only that the call was invalid, whatever is there.
        if error.errno == errno.EINVAL and self._quarantine.put_away(
            path, None, HeaderFinding.KIND, stop
        ):
            return ReadOutcome.CORRUPT
        return ReadOutcome.FAILED

    def _direct_for(self, buffers: Sequence[memoryview], shape: ObjectShape) -> int:
        """Return O_DIRECT if it was asked for and these buffers permit it."""
        if not self._direct_flag or len(buffers) != 1 or not shape.is_whole:
            return 0
        payload = buffers[0]
        if payload.nbytes % BLOCK_BYTES or not payload.nbytes:
            return 0
        return 0 if address_of(payload) % BLOCK_BYTES else self._direct_flag

    def _try_to_write(self, new: _New, stop: Stop) -> WriteOutcome | None:
        """Write the object as far as what stands there asks for it; None if that has changed."""
        if not self._is_within(new.path, stop):
            return None
        # Nearly always there is nothing, and this says so without an exception.
        if not os.access(new.path, os.F_OK, dir_fd=self._root_fd, follow_symlinks=False):
            return WriteOutcome.OK if self._store(new, None, stop) else None
        status = os.stat(new.path, dir_fd=self._root_fd, follow_symlinks=False)
        # Nearly always the length tells that it is the very object, at the price of one call.
        if _may_be_object(status, new):
            return WriteOutcome.PRESENT
        try:
            fd = os.open(new.path, READ_FLAGS, dir_fd=self._root_fd)
        except OSError as error:
            if error.errno in _NO_FILE:
                self._quarantine.put_away(new.path, None, HeaderFinding.KIND, stop)
            elif error.errno != errno.ENOENT:
                raise
            return None
        try:
            return self._write_beside(fd, new, stop)
        finally:
            os.close(fd)

    def _write_beside(self, fd: int, new: _New, stop: Stop) -> WriteOutcome | None:
        """Write the object beside the file `fd`, which stays open so that its identity is its own."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            self._quarantine.put_away(new.path, None, HeaderFinding.KIND, stop)
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
                        self._quarantine.put_away(
                            new.path, _identity(status), HeaderFinding.PAYLOAD, stop
                        )
                    return None
                new = new._replace(buffers=[united], shape=new.shape.with_columns(present))
            return WriteOutcome.OK if self._store(new, _identity(status), stop) else None
        self._quarantine.put_away(new.path, _identity(status), finding, stop)
        return None

    def _store(self, new: _New, standing: Identity | None, stop: Stop) -> bool:
        """Write a new file and give it the name, which is free or that of the file `standing`.

        False if that is so no more, or if it had to stop on the way: then nothing is left of it.
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
            # Mostly only the last two are new, but somebody may have emptied the store.
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
    """Say whether a file's length alone tells that it is the object that is to be written."""
    told = new.shape.told_by_length and stat.S_ISREG(status.st_mode)
    return told and status.st_size == BLOCK_BYTES + new.shape.nbytes
