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
from contextlib import suppress
from itertools import islice
from typing import Final, Protocol

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


class Draft(Protocol):
    """A new file that has no final name yet. One thread owns it."""

    fd: int

    def publish(self, path: str) -> bool:
        """Give the file its name below the root; False if the name is taken."""
        ...

    def replace(self, path: str) -> None:
        """Give the file its name below the root, in the place of the file that has it."""
        ...

    def close(self) -> None:
        """Close the file. If it was not published, nothing of it is left."""
        ...


class Publisher(Protocol):
    """Makes drafts on the filesystem of one store."""

    def draft(self, directory: str, flags: int) -> Draft:
        """Return a new, empty draft that will be published in `directory`; `flags` for `open`."""
        ...


class UnnamedDraft:
    """A draft without any name (`O_TMPFILE`)."""

    def __init__(self, root_fd: int, fd: int) -> None:
        self._root_fd = root_fd
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
        # Locked like a `NamedDraft`, for the moment that it is one, so that no sweep takes the name.
        try_to_lock(self.fd)
        temporary = f"{TEMPORARY}/{secrets.token_hex(16)}"
        self._link(temporary)
        try:
            os.replace(temporary, path, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._root_fd)
            raise

    def close(self) -> None:
        """Close the file; the kernel takes an unpublished one back."""
        os.close(self.fd)

    def _link(self, path: str) -> None:
        # Naming both directories makes Python call linkat with AT_SYMLINK_FOLLOW; plain link would
        # try to link the entry of /proc itself.
        os.link(
            f"/proc/self/fd/{self.fd}",
            path,
            src_dir_fd=self._root_fd,
            dst_dir_fd=self._root_fd,
            follow_symlinks=True,
        )


class UnnamedFiles:
    """Drafts for filesystems that have files without a name."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd

    def draft(self, directory: str, flags: int) -> UnnamedDraft:
        """Return a new, empty draft that will be published in `directory`."""
        fd = os.open(directory, os.O_TMPFILE | _WRITE | flags, FILE_MODE, dir_fd=self._root_fd)
        return UnnamedDraft(self._root_fd, fd)


class NamedDraft:
    """A draft under a temporary name, locked for as long as its writer lives."""

    def __init__(self, root_fd: int, fd: int, temporary: str) -> None:
        self._root_fd = root_fd
        self._temporary = temporary
        self.fd = fd

    def publish(self, path: str) -> bool:
        """Give the file its name below the root; False if the name is taken."""
        try:
            os.link(
                self._temporary,
                path,
                src_dir_fd=self._root_fd,
                dst_dir_fd=self._root_fd,
                follow_symlinks=False,
            )
        except FileExistsError:
            return False
        return True

    def replace(self, path: str) -> None:
        """Give the file its name below the root, in the place of the file that has it."""
        os.replace(self._temporary, path, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)

    def close(self) -> None:
        """Take the temporary name away, unless somebody has, and close the file."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._root_fd)
        finally:
            os.close(self.fd)


class NamedFiles:
    """Drafts for filesystems where every file has a name."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd

    def draft(self, directory: str, flags: int) -> NamedDraft:
        """Return a new, empty draft; `directory` must be there, though it is not used yet."""
        os.stat(directory, dir_fd=self._root_fd, follow_symlinks=False)
        for _ in range(_NAME_TRIES):
            temporary = f"{TEMPORARY}/{secrets.token_hex(16)}"
            create = _WRITE | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags
            fd = os.open(temporary, create, FILE_MODE, dir_fd=self._root_fd)
            draft = NamedDraft(self._root_fd, fd, temporary)
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


def sweep(root_fd: int) -> int:
    """Remove the temporary files of dead writers, at most `SWEEP_MAX`; return how many."""
    swept = 0
    fd = os.open(TEMPORARY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        with os.scandir(fd) as entries:
            for entry in islice(entries, SWEEP_MAX):
                swept += _sweep_one(fd, entry.name)
    finally:
        os.close(fd)
    return swept


def _sweep_one(directory_fd: int, name: str) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory_fd)
    except OSError:
        return False
    try:
        lock = try_to_lock(fd)
        if lock is Lock.TAKEN:
            return False
        if lock is Lock.UNKNOWN and time.time() - os.fstat(fd).st_mtime < SWEEP_AGE_S:
            return False
        os.unlink(name, dir_fd=directory_fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def choose_publisher(root_fd: int, flags: int) -> Publisher:
    """Return the better publisher that works here, after trying it; raises OSError if none does.

    `flags` are what drafts will be opened with; a filesystem that refuses them says so here.
    """
    unnamed = UnnamedFiles(root_fd)
    try:
        _try(unnamed, root_fd, flags)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
    else:
        return unnamed
    named = NamedFiles(root_fd)
    _try(named, root_fd, flags)
    return named


def _try(publisher: Publisher, root_fd: int, flags: int) -> None:
    path = f"{TEMPORARY}/{secrets.token_hex(16)}"
    draft = publisher.draft(TEMPORARY, flags)
    try:
        # Locked, so that the sweep of another who opens the store leaves the name alone.
        try_to_lock(draft.fd)
        if draft.publish(path):
            # Where there are no locks it may be swept all the same, if the clocks differ much.
            with suppress(FileNotFoundError):
                os.unlink(path, dir_fd=root_fd)
    finally:
        draft.close()
