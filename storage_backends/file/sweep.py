"""One sweep over the files of a store: removes expired files, then the least recently used ones.

A sweep is also called a pass. A file's mtime is the time of its last use, and never later than the
mtime of its predecessor in a chain of pages (`uses`). A pass removes files in ascending order of mtime,
so it removes leaves before roots. All times are by the filesystem's clock, because a host with a wrong
clock must not empty a shared store. A file's size is its allocated blocks.

Memory is bounded by a few thousand counters and `_SORTED_MAX` names. A pass adds up file sizes by age,
derives the age above which files must be removed, and walks the files again to remove them. Sizes are
added up per age bucket; the ages in one bucket differ by about one percent. A bucket from which only
some files must be removed is sorted by age.

Records are kept at any age: manifests, and markers, by which groups of other TP sizes find pages.
Without records, existing pages could not be found or identified. A file is recognised as a record by
its length and then by its header. `lockstep store rm` removes records with their pages.

Files in the quarantine directory are removed first. A directory there is removed at the age
`EMPTY_AGE_S`. Its size is unknown, because the sizes of its files are not added up.

Readers and writers are safe during a pass: readers keep their files open, and writers create a removed
directory again. A pass enters only the store's own directories and follows no link.
"""

import errno
import os
import stat
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf, log2
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from ...coordinator.validated_settings import Settings
from ...page_format.object_name import OBJECTS, name_digest
from ..records.catalogue import RECORD_BYTES, is_record
from .contents import FileContents
from .listing import stored_as
from .publish import FILE_MODE, sweep
from .quarantine import QUARANTINE
from .trees import remove_tree
from .write_lock_slots import Lock, try_to_lock

HIGH_WATER: Final = 0.95
"""Fraction of the quota above which a pass shrinks the store to `LOW_WATER`."""
LOW_WATER: Final = 0.9
WRITTEN_PART: Final = 0.05
"""Fraction of the quota; when a process has written that much since the last pass, it starts a pass at
once. A pass leaves at most `HIGH_WATER` of the quota in use, so a single process stays within the
quota."""
LOCK: Final = "sweep.lock"
"""Name of the file in the root that a sweeping process locks. The file's mtime is the end of the last
pass."""
EMPTY_AGE_S: Final = 3600.0
"""Seconds after which an empty directory, or any directory in the quarantine directory, is removed."""
FUTURE_S: Final = 60.0
"""Maximum seconds by which a correct mtime is ahead of the filesystem's clock. A later mtime was
written with a wrong clock. A pass resets that mtime to now, because otherwise the file would be
kept until then."""
QUOTA_BYTES_MAX: Final = 1 << 60
_BUCKETS_PER_DOUBLING: Final = 64
_BUCKETS: Final = 40 * _BUCKETS_PER_DOUBLING
_SORTED_MAX: Final = 1 << 16
"""Maximum number of files of one age bucket that a pass sorts at a time. If the bucket has more, the
pass walks the files again."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAMESPACE_DIGITS: Final = 32
_DIRECTORY_DIGITS: Final = 2
_FILE_DIGITS: Final = 64
"""Number of hexadecimal digits in the name of an object's file. Files with other names are ignored."""
_BLOCK_BYTES: Final = 512
"""Bytes per unit of `st_blocks`, the same on every filesystem."""


@dataclass(frozen=True, kw_only=True)
class SweepLimits(Settings):
    """The limits of a store: quota and time to live."""

    quota_bytes: Annotated[int, Meta(ge=0, le=QUOTA_BYTES_MAX)] | None = None
    """Maximum total size of the files in bytes. 0 means no limit. None means half of the space that the
    root's filesystem would have if the store were empty. Files on other filesystems mounted below the
    root are included in the total, because those filesystems would otherwise fill up."""
    ttl_s: Annotated[float, Meta(ge=1, le=1e10)] | None = None
    """Seconds since the last use after which an object expires; None for never."""

    def quota(self, place: int | Path, held: int) -> int | None:
        """Return the quota in bytes of the store in the directory `place`, or None for no limit.

        `held` is the number of bytes that the store uses now.
        """
        if self.quota_bytes is not None:
            return self.quota_bytes or None
        room = os.statvfs(place)
        # Use no limit on a filesystem that does not report its size.
        return (room.f_bavail * room.f_frsize + held) // 2 if room.f_blocks else None

    def is_kept(self, root_fd: int) -> bool:
        """Return whether the store is surely within its limits, so that no pass is needed.

        Reads no file, but compares the used space of the whole filesystem with the default quota.
        Returns False if a quota or time to live is set, because only a pass can check these.
        """
        if self.ttl_s is not None or self.quota_bytes is not None:
            return False
        room = os.statvfs(root_fd)
        used = (room.f_blocks - room.f_bfree) * room.f_frsize
        quota = self.quota(root_fd, used)
        return quota is None or used <= quota * HIGH_WATER

    def written_until_pass(self, root_fd: int) -> float:
        """Return the number of bytes that a process may write between two passes."""
        quota = self.quota_bytes
        if quota is None:
            room = os.statvfs(root_fd)
            # Accept that a nearly full disk makes passes frequent. They are cheap in a small store, and
            # in a large store the first pass removes so many files that later passes are rare.
            half = room.f_bavail // 2 * room.f_frsize
            return max(half * WRITTEN_PART, 1.0) if room.f_blocks else inf
        return quota * WRITTEN_PART or inf

    def in_words(self, place: int | Path) -> str:
        """Return a phrase for the log: the disk space that a store in the directory `place` may use."""
        if self.quota_bytes is None:
            room = os.statvfs(place)
            if not room.f_blocks:
                return "its whole filesystem, which does not report its size"
            free_gib = room.f_bavail * room.f_frsize / (1 << 30)
            return (
                "half of its filesystem's free space, with its own files counted as free;"
                f" {free_gib:,.1f} GiB are free"
            )
        gib = self.quota_bytes / (1 << 30)
        return f"{gib:,.1f} GiB (its quota)" if gib else "its whole filesystem (quota_gib=0)"


class _Seen(NamedTuple):
    """A file that a sweep found. The sort order of these tuples is the order of removal."""

    used_ns: int
    namespace: str
    digits: str
    name: str


class _Stopped(Exception):
    """Raised to end a sweep early, because its caller wants it to stop."""


def sweep_store(root_fd: int, limits: SweepLimits, *, now: float, stop: Callable[[], bool]) -> int:
    """Run one pass and return the number of removed files.

    `now` is by the filesystem's clock. The pass calls `stop` before each file, and ends early if `stop`
    returns True. Raises OSError if the store's own directories cannot be read.
    """
    a_pass = _Pass(root_fd, limits, now, stop)
    with suppress(_Stopped):
        a_pass.run()
    return a_pass.files_removed


@contextmanager
def sweeping(root_fd: int, *, rest_s: float) -> Generator[float | None]:
    """Hold the store's sweep lock for one pass, and yield the time by the filesystem's clock.

    Yields None if another process has the lock, or finished a pass less than `rest_s` seconds ago. The
    kernel releases the lock when its holder dies. On a filesystem without locks several processes may
    sweep at the same time, which only costs time.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    before = _lstat(root_fd, LOCK)
    fd = os.open(LOCK, flags, FILE_MODE, dir_fd=root_fd)
    try:
        if try_to_lock(fd) is Lock.TAKEN:
            yield None
            return
        # Check the time of the last pass again, because a pass may have ended before the lock was
        # taken.
        last = os.fstat(fd)
        now = _touch(fd)
        if before is not None and now - rest_s < last.st_mtime <= now:
            os.utime(fd, ns=(last.st_atime_ns, last.st_mtime_ns))
            yield None
            return
        yield now
        _touch(fd)
    finally:
        os.close(fd)


def _touch(fd: int) -> float:
    """Set a file's mtime to the filesystem's current time, and return that time."""
    os.utime(fd)
    return os.fstat(fd).st_mtime


class _Pass:
    def __init__(
        self, root_fd: int, limits: SweepLimits, now: float, stop: Callable[[], bool]
    ) -> None:
        self._root_fd = root_fd
        self._limits = limits
        self._now = now
        self._stop = stop
        self._contents = FileContents()
        self._room_by_age = array("q", bytes(8 * _BUCKETS))
        self._left = 0
        self._counted = False
        """Whether all files were added up, so that `_left` is the total size of the store's files in
        bytes. Each removed file is subtracted from `_left`."""
        self.files_removed = 0

    def run(self) -> None:
        with suppress(FileNotFoundError):
            sweep(self._root_fd)
        self._walk_quarantine(self._is_expired)
        self._walk_objects(self._is_expired, self._count)
        self._counted = True
        quota = self._limits.quota(self._root_fd, self._left)
        if quota is None or self._left <= quota * HIGH_WATER:
            return
        target = int(quota * LOW_WATER)
        # Remove corrupt files first, because they have the least value.
        self._walk_quarantine(lambda _: self._left > target)
        oldest = self._first_bucket_to_go(self._left - target)
        while self._remove_oldest(oldest, target):
            pass

    def _remove_oldest(self, bucket: int, target: int) -> bool:
        """Remove all files in older age buckets than `bucket`, then the oldest files in `bucket`.

        Files in one bucket have about the same age. Files in `bucket` are removed until `target` bytes
        remain. Returns True if too many files were in `bucket` to collect all of them, so that another
        walk is needed.
        """
        oldest: list[_Seen] = []
        more = False

        def collect(seen: _Seen, status: os.stat_result) -> None:
            nonlocal more
            if self._bucket(status) == bucket:
                oldest.append(seen)
            if len(oldest) >= 2 * _SORTED_MAX:
                oldest.sort()
                del oldest[_SORTED_MAX:]
                more = True

        self._walk_objects(lambda status: self._bucket(status) > bucket, collect)
        before = self.files_removed
        for each in sorted(oldest):
            self._check_stop()
            if self._left <= target:
                return False
            self._remove_unused(each)
        return more and self.files_removed > before

    def _remove_unused(self, seen: "_Seen") -> None:
        """Remove a file unless it was used after the sweep found it. Follow no link on its path."""
        for objects in _opened(self._root_fd, OBJECTS):
            for namespace in _opened(objects, seen.namespace):
                for directory in _opened(namespace, seen.digits):
                    status = _lstat(directory, seen.name)
                    if status is not None and status.st_mtime_ns == seen.used_ns:
                        self._remove(directory, seen.name, status)

    def _remove(self, directory: int, name: str, status: os.stat_result) -> bool:
        try:
            os.unlink(name, dir_fd=directory)
        except OSError:
            return False
        self.files_removed += 1
        self._left -= _room(status) if self._counted else 0
        return True

    def _count(self, _: "_Seen", status: os.stat_result) -> None:
        self._room_by_age[self._bucket(status)] += _room(status)

    def _first_bucket_to_go(self, excess: int) -> int:
        """Return the first (youngest) age bucket that must lose files to free `excess` bytes."""
        bucket = _BUCKETS
        while excess > 0 and bucket:
            bucket -= 1
            excess -= self._room_by_age[bucket]
        return bucket

    def _is_expired(self, status: os.stat_result) -> bool:
        return self._limits.ttl_s is not None and self._now - status.st_mtime > self._limits.ttl_s

    def _bucket(self, status: os.stat_result) -> int:
        age_s = max(0.0, self._now - status.st_mtime)
        return min(_BUCKETS - 1, int(log2(1.0 + age_s) * _BUCKETS_PER_DOUBLING))

    def _walk_objects(
        self,
        goes: Callable[[os.stat_result], bool],
        stays: "Callable[[_Seen, os.stat_result], None]",
    ) -> None:
        for objects in _opened(self._root_fd, OBJECTS):
            for namespace, above in self._directories(objects, _NAMESPACE_DIGITS):
                for digits, directory in self._directories(above, _DIRECTORY_DIGITS):
                    for name, status in self._files(directory, goes, _FILE_DIGITS):
                        stays(_Seen(status.st_mtime_ns, namespace, digits, name), status)

    def _walk_quarantine(self, goes: Callable[[os.stat_result], bool]) -> None:
        for quarantine in _opened(self._root_fd, QUARANTINE):
            for _ in self._files(quarantine, goes, None):
                pass
            with os.scandir(quarantine) as entries:
                directories = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
            for name in directories:
                status = _lstat(quarantine, name)
                if status is not None and (
                    self._now - status.st_mtime > EMPTY_AGE_S or goes(status)
                ):
                    remove_tree(quarantine, name, go_on=self._go_on)

    def _go_on(self) -> bool:
        self._check_stop()
        return True

    def _directories(self, above: int, digits: int) -> Iterator[tuple[str, int]]:
        """Yield (name, descriptor) of the store's directories directly below the directory `above`.

        Removes each directory if it is empty and old, after the caller has used it. Names that do not
        have `digits` hexadecimal digits are ignored.
        """
        with os.scandir(above) as entries:
            for entry in entries:
                self._check_stop()
                if not _is_ours(entry.name, digits):
                    continue
                for fd in _opened(above, entry.name):
                    yield entry.name, fd
                status = _lstat(above, entry.name)
                if status is not None and self._now - status.st_mtime > EMPTY_AGE_S:
                    # Ignore the error of `rmdir`: the directory is not empty.
                    with suppress(OSError):
                        os.rmdir(entry.name, dir_fd=above)

    def _files(
        self, directory: int, goes: Callable[[os.stat_result], bool], digits: int | None
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Remove the regular files for which `goes` returns True; yield the others, except records.

        If `digits` is given, files whose names do not have that number of hexadecimal digits are
        ignored.
        """
        with os.scandir(directory) as entries:
            for entry in entries:
                self._check_stop()
                if digits is not None and not _is_ours(entry.name, digits):
                    continue
                status = _lstat(directory, entry.name)
                if status is None or not stat.S_ISREG(status.st_mode):
                    continue
                if status.st_mtime > self._now + FUTURE_S:
                    # Ignore the error: the mtime of a file that another user owns cannot be reset.
                    with suppress(OSError):
                        os.utime(entry.name, dir_fd=directory, follow_symlinks=False)
                record = status.st_size in RECORD_BYTES and self._is_record(directory, entry.name)
                if not record and goes(status) and self._remove(directory, entry.name, status):
                    continue
                # Count records in the store's size, but do not yield them, because they are never
                # removed.
                self._left += 0 if self._counted else _room(status)
                if not record:
                    yield entry.name, status

    def _is_record(self, directory: int, name: str) -> bool:
        """Return whether a file is a record; True if the file cannot be read.

        The file's name must be the digest of the record's name.
        """
        try:
            stored = stored_as(directory, name, self._contents, self._now)
        except OSError:
            return True
        if stored is None or not is_record(stored):
            return False
        digest = name_digest(stored.name)
        return digest is not None and digest.hex() == name

    def _check_stop(self) -> None:
        if self._stop():
            raise _Stopped


def _opened(above: int, name: str) -> Iterator[int]:
    """Yield a descriptor of the directory `name`; nothing if it does not exist or is a link."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            return
        raise
    try:
        yield fd
    finally:
        os.close(fd)


def _is_ours(name: str, digits: int) -> bool:
    return len(name) == digits and not name.strip("0123456789abcdef")


def _lstat(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None


def _room(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK_BYTES
