"""The directory of a `3fs://` store with the large files whose slots contain the objects.

    <root>/store              the store's identity, which its index records too
    <root>/slots-<number>     one file of slots, all of the same length

The first writer to a slot of a file creates the file at its full length. A path that is not a regular
file of that length is not used: links are not followed, and nothing is replaced.
"""

import ctypes
import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Final

from ...errors import ConfigError
from ..file.publish import DIRECTORY_MODE, FILE_MODE
from ..file.trust import Trust, check_own
from .page_index import PageIndex, SlotSizes
from .transfers import Transfers

STORE: Final = "store"
FILES_MAX: Final = 256
"""Maximum number of files; every process keeps all of them open."""
_PLACE: Final = re.compile(r"slots-[0-9]{6}")
_IDENTITY: Final = re.compile(r"[0-9a-f]{32}")
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class WrongFileError(OSError):
    """A file of slots does not exist, or its path is not a regular file of the right length."""


class SlotFiles:
    """The files of one store, open for all threads. Methods may block and raise OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._root_fd = -1
        self._file_bytes = 0
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    def open(self, index: PageIndex) -> None:
        """Create the directory, and check that the directory and the index belong to one store.

        A new index, or one whose database was lost, adopts the identity of the directory. Raises
        `ConfigError` if the index belongs to another directory.
        """
        self._root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        ours = self._identity()
        theirs = index.identity(ours)
        if ours != theirs:
            raise ConfigError(
                f"index {index.text} belongs to another store than {self._root}; mount the "
                "filesystem that it belongs to, or give another index"
            )

    def use(self, settings: SlotSizes, transfers: Transfers) -> None:
        """Set the slot sizes, which determine the length of all slot files, and the `transfers`.

        Each file is registered with `transfers` when it is opened.
        """
        self._file_bytes = settings.slot_bytes * settings.file_slots
        self._transfers = transfers

    def fd(self, place: str, *, create: bool) -> int:
        """Return the descriptor of the slot file `place`, which is open and registered for transfers.

        With `create` the file is created, or extended to its full length if its creator died before
        that. The file stays open until `close`. Raises `WrongFileError` for a file that must not be
        used.
        """
        with self._lock:
            fd = self._open.get(place)
            if fd is None:
                if _PLACE.fullmatch(place) is None:
                    raise WrongFileError(errno.EINVAL, f"{place!r} is not a file of slots")
                fd = self._open_file(place, create=create)
                self._open[place] = fd
            return fd

    def close(self) -> None:
        """Close all files; no I/O may be in flight. Idempotent."""
        with self._lock:
            for fd in self._open.values():
                # Deregister the descriptor before closing it. Otherwise a ring would use the closed
                # file when the kernel reuses the descriptor for another one.
                with suppress(OSError):
                    self._transfers.deregister(fd)
                os.close(fd)
            self._open.clear()
            root_fd, self._root_fd = self._root_fd, -1
            if root_fd >= 0:
                os.close(root_fd)

    def _open_file(self, place: str, *, create: bool) -> int:
        flags = os.O_RDWR | _FLAGS | (os.O_CREAT if create else 0)
        try:
            fd = os.open(place, flags, FILE_MODE, dir_fd=self._root_fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise WrongFileError(error.errno, f"{place}: {error.strerror}") from error
            raise
        try:
            self._check_file(fd, place, create=create)
            self._transfers.register(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_file(self, fd: int, place: str, *, create: bool) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise WrongFileError(errno.EINVAL, f"{place} is not a regular file")
        if status.st_size < self._file_bytes and create:
            allocate(fd, self._file_bytes)
        elif status.st_size != self._file_bytes:
            found = f"{place} has {status.st_size} bytes instead of {self._file_bytes}"
            raise WrongFileError(errno.EINVAL, found)

    def _identity(self) -> str:
        """Return the store's identity; the first process creates it."""
        temporary = f"{STORE}-{secrets.token_hex(8)}"
        create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
        with suppress(FileNotFoundError):
            return self._read_identity()
        fd = os.open(temporary, create, FILE_MODE, dir_fd=self._root_fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(secrets.token_hex(16).encode("ascii"))
            with suppress(FileExistsError):
                os.link(temporary, STORE, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        finally:
            os.unlink(temporary, dir_fd=self._root_fd)
        return self._read_identity()

    def _read_identity(self) -> str:
        fd = os.open(STORE, os.O_RDONLY | _FLAGS, dir_fd=self._root_fd)
        try:
            text = os.read(fd, 64).decode("ascii", "replace")
        finally:
            os.close(fd)
        if _IDENTITY.fullmatch(text) is None:
            raise ConfigError(
                f"{self._root / STORE} does not contain a store's identity; give another directory, or "
                "remove this one if it has nothing else in it"
            )
        return text


@contextmanager
def made_directory(path: Path, trust: Trust) -> Generator[None]:
    """Create a directory with its parents, and remove the new directories if the block fails.

    Directories that existed before, or that are no longer empty, stay. Raises `ConfigError` for a
    directory to which untrusted users can write.
    """
    new = list(takewhile(lambda each: not each.exists(), (path, *path.parents)))
    try:
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        check_own(path, trust)
        yield
    except BaseException:
        with suppress(OSError):
            for each in new:
                each.rmdir()
        raise


def place_of(slot: int, settings: SlotSizes) -> tuple[str, int]:
    """Return (file name, offset in the file) of the slot with this number."""
    number, within = divmod(slot, settings.file_slots)
    return f"slots-{number:06d}", within * settings.slot_bytes


def allocate(fd: int, nbytes: int) -> None:
    """Extend a file to its full length, with disk space reserved if the filesystem supports that."""
    # Avoid posix_fallocate, because the C library's version writes to every block if the filesystem
    # cannot reserve space.
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        return
    error = ctypes.get_errno()
    if error not in _NO_FALLOCATE:
        raise OSError(error, os.strerror(error))
    os.ftruncate(fd, nbytes)
