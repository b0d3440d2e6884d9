"""How a new file gets its name: whole, once, and with nothing left over when its writer dies.

Where the filesystem has files without a name (`O_TMPFILE`), a new file gets its only name when it
is complete, and the kernel takes it back if its writer dies before. Elsewhere it is written under a
temporary name that its writer keeps locked; a lock that nobody holds marks the file of a dead
writer, which the next one that opens the store sweeps away. Where there are no locks either, only
the age of a temporary file tells that its writer is dead. Both give the final name with `link`,
which refuses a name that is taken: the first writer wins. A file that is to take another's place
gets a temporary name first, if it has none, and then the final one with `rename`, at once.
"""

import errno
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final

from .turns import Lock, try_to_lock

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
TEMPORARY: Final = "temporary"
SWEEP_MAX: Final = 4096
"""Temporary files that one opening of a store looks at."""
SWEEP_AGE_S: Final = 3600.0
"""How old a temporary file must be to be swept where there are no locks; writing one takes seconds,
but the clocks of those who share a filesystem may differ."""
_NAME_TRIES: Final = 16
_WRITE: Final = os.O_WRONLY | os.O_CLOEXEC


class Draft:
    """A new file that has no final name yet: none at all, or a temporary one. One thread owns it."""

    def __init__(self, root_fd: int, fd: int, temporary: str | None = None) -> None:
        self._root_fd = root_fd
        self._temporary = temporary
        self.fd = fd

    def publish(self, path: str) -> bool:
        """Give the file its name below the root; False if the name is taken."""
        try:
            self._link(path)
        except FileExistsError:
            return False
        return True

    def replace(self, path: str) -> None:
        """Give the file its name below the root, in the place of the file that has it."""
        if self._temporary is None:
            # Locked like one that was named from the beginning, so that no sweep takes the name.
            try_to_lock(self.fd)
            temporary = _new_name()
            self._link(temporary)
            self._temporary = temporary
        os.replace(self._temporary, path, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)

    def close(self) -> None:
        """Close the file. If it was not published, nothing of it is left."""
        try:
            if self._temporary is not None:
                with suppress(FileNotFoundError):
                    os.unlink(self._temporary, dir_fd=self._root_fd)
        finally:
            os.close(self.fd)

    def _link(self, path: str) -> None:
        # Naming both directories makes Python call linkat with AT_SYMLINK_FOLLOW; plain link would
        # try to link the entry of /proc itself.
        os.link(
            self._temporary or f"/proc/self/fd/{self.fd}",
            path,
            src_dir_fd=self._root_fd,
            dst_dir_fd=self._root_fd,
            follow_symlinks=self._temporary is None,
        )


MakeDraft = Callable[[int, str, int], Draft]
"""Returns a new, empty draft below a root that will be published in a directory; `flags` for `open`."""


def draft_unnamed(root_fd: int, directory: str, flags: int) -> Draft:
    """Make a draft where the filesystem has files without a name."""
    fd = os.open(directory, os.O_TMPFILE | _WRITE | flags, FILE_MODE, dir_fd=root_fd)
    return Draft(root_fd, fd)


def draft_named(root_fd: int, directory: str, flags: int) -> Draft:
    """Make a draft where every file has a name, locked for as long as its writer lives.

    `directory` must be there, though it is not used yet.
    """
    os.stat(directory, dir_fd=root_fd, follow_symlinks=False)
    for _ in range(_NAME_TRIES):
        temporary = _new_name()
        create = _WRITE | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags
        fd = os.open(temporary, create, FILE_MODE, dir_fd=root_fd)
        draft = Draft(root_fd, fd, temporary)
        try:
            # A sweep may have come in between, and then the name is gone or about to be.
            kept = try_to_lock(fd) is not Lock.TAKEN and os.fstat(fd).st_nlink > 0
        except BaseException:
            draft.close()
            raise
        if kept:
            return draft
        draft.close()
    raise OSError(errno.EAGAIN, "every temporary file was swept away as soon as it was made")


def _new_name() -> str:
    return f"{TEMPORARY}/{secrets.token_hex(16)}"


def sweep(root_fd: int) -> None:
    """Remove the temporary files of dead writers, at most `SWEEP_MAX`."""
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
    """Return the better kind of draft that works here, after trying it; raises OSError if none does.

    `flags` are what drafts will be opened with; a filesystem that refuses them says so here.
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
        # Locked, so that the sweep of another who opens the store leaves the name alone.
        try_to_lock(draft.fd)
        if draft.publish(path):
            # Where there are no locks it may be swept all the same, if the clocks differ much.
            with suppress(FileNotFoundError):
                os.unlink(path, dir_fd=root_fd)
    finally:
        draft.close()
