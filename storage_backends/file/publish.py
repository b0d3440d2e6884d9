"""Publishes a new file under its name: atomically, at most once, and without leftovers of dead writers.

With `O_TMPFILE` a new file gets its only name when it is complete, and the kernel frees it if the
writer dies earlier. Without `O_TMPFILE` the writer creates the file under a temporary name and locks
it. A temporary file without a lock belongs to a dead writer, and the next process that opens the store
removes it. On a filesystem without locks only a temporary file's age shows that its writer is dead.

`link` gives the file its final name, and fails if the name is taken, so the first writer wins. A file
that replaces another first gets a temporary name, and then `rename` gives it the final name atomically.
"""

import errno
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final

from .write_lock_slots import Lock, try_to_lock

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
TEMPORARY: Final = "temporary"
SWEEP_MAX: Final = 4096
"""Maximum number of temporary files that a process checks when it opens a store."""
SWEEP_AGE_S: Final = 3600.0
"""Age in seconds at which temporary files are removed on a filesystem without locks. It is much longer
than a write takes, because the clocks of hosts that share a filesystem may differ."""
_NAME_TRIES: Final = 16
_WRITE: Final = os.O_WRONLY | os.O_CLOEXEC


class Draft:
    """A new file, which has no name or a temporary one until it is published. One thread uses it."""

    def __init__(self, root_fd: int, fd: int, temporary: str | None = None) -> None:
        self._root_fd = root_fd
        self._temporary = temporary
        self.fd = fd

    def publish(self, path: str) -> bool:
        """Publish the file at `path` below the root; return False if that path is taken."""
        try:
            self._link(path)
        except FileExistsError:
            return False
        return True

    def replace(self, path: str) -> None:
        """Publish the file at `path` below the root, in place of the file that is there."""
        if self._temporary is None:
            # Lock the file, so that a sweep by another process does not remove its temporary name.
            try_to_lock(self.fd)
            temporary = _new_name()
            self._link(temporary)
            self._temporary = temporary
        os.replace(self._temporary, path, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)

    def close(self) -> None:
        """Close the file. If it was not published, remove it."""
        try:
            if self._temporary is not None:
                with suppress(FileNotFoundError):
                    os.unlink(self._temporary, dir_fd=self._root_fd)
        finally:
            os.close(self.fd)

    def _link(self, path: str) -> None:
        # Pass both directories so that Python calls linkat with AT_SYMLINK_FOLLOW. Without that flag
        # linkat would link the symbolic link in /proc/self/fd instead of the file.
        os.link(
            self._temporary or f"/proc/self/fd/{self.fd}",
            path,
            src_dir_fd=self._root_fd,
            dst_dir_fd=self._root_fd,
            follow_symlinks=self._temporary is None,
        )


MakeDraft = Callable[[int, str, int], Draft]
"""A function that creates a draft: an empty file without its final name. The arguments are the root,
the directory in which the draft will be published, and flags for `open`."""


def draft_unnamed(root_fd: int, directory: str, flags: int) -> Draft:
    """Create a draft (a new file) without a name, on a filesystem that supports unnamed files."""
    fd = os.open(directory, os.O_TMPFILE | _WRITE | flags, FILE_MODE, dir_fd=root_fd)
    return Draft(root_fd, fd)


def draft_named(root_fd: int, directory: str, flags: int) -> Draft:
    """Create a draft (a new file) under a temporary name, and lock it until it is closed.

    The draft will be published in `directory`, which must exist.
    """
    os.stat(directory, dir_fd=root_fd, follow_symlinks=False)
    for _ in range(_NAME_TRIES):
        temporary = _new_name()
        create = _WRITE | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags
        fd = os.open(temporary, create, FILE_MODE, dir_fd=root_fd)
        draft = Draft(root_fd, fd, temporary)
        try:
            # Try another name if a sweep by another process has removed this one, or has locked the
            # file to remove it.
            kept = try_to_lock(fd) is not Lock.TAKEN and os.fstat(fd).st_nlink > 0
        except BaseException:
            draft.close()
            raise
        if kept:
            return draft
        draft.close()
    raise OSError(errno.EAGAIN, "other processes removed every new temporary file at once")


def _new_name() -> str:
    return f"{TEMPORARY}/{secrets.token_hex(16)}"


def sweep(root_fd: int) -> None:
    """Remove the temporary files of dead writers; check at most `SWEEP_MAX` files."""
    fd = os.open(TEMPORARY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        with os.scandir(fd) as entries:
            for entry in islice(entries, SWEEP_MAX):
                _sweep_one(fd, entry.name)
    finally:
        os.close(fd)


def _sweep_one(directory_fd: int, name: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        fd = os.open(name, flags, dir_fd=directory_fd)
        try:
            lock = try_to_lock(fd)
            dead = lock is Lock.OURS
            if lock is Lock.UNKNOWN:
                dead = time.time() - os.fstat(fd).st_mtime >= SWEEP_AGE_S
            if dead:
                os.unlink(name, dir_fd=directory_fd)
        finally:
            os.close(fd)


def choose_draft(root_fd: int, flags: int) -> MakeDraft:
    """Return a function that creates drafts, for the best kind of draft that this filesystem supports.

    Tests each kind with a trial file, unnamed drafts first. `flags` are those with which drafts will be
    opened. Raises OSError if no kind works.
    """
    try:
        _try(draft_unnamed, root_fd, flags)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
    else:
        return draft_unnamed
    _try(draft_named, root_fd, flags)
    return draft_named


def _try(make: MakeDraft, root_fd: int, flags: int) -> None:
    path = _new_name()
    draft = make(root_fd, TEMPORARY, flags)
    try:
        # Lock the trial file, so that a sweep by another process does not remove it.
        try_to_lock(draft.fd)
        if draft.publish(path):
            # Accept that the trial file does not exist: on a filesystem without locks a sweep by
            # another host may have removed it, if the hosts' clocks differ.
            with suppress(FileNotFoundError):
                os.unlink(path, dir_fd=root_fd)
    finally:
        draft.close()
