"""Helpers for tests of `file://`: a store in a directory, and system calls that fail or block."""

import asyncio
import errno
import os
import random
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lockstep.page_format.object_name import ObjectName, object_path
from lockstep.storage_backends.base import StorageBackend
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from lockstep.storage_backends.file.contents import BLOCK_BYTES
from lockstep.storage_backends.file.objects import Durability, ObjectFiles
from lockstep.storage_backends.file.sweeper import Sweeper
from tests.kit.storage.calls import HEALTHY_S, KIB, digest_of

_open = os.open


class FileStore:
    def __init__(
        self, root: Path, durability: Durability = Durability.NONE, *, direct: bool = False
    ) -> None:
        self.root = root
        self.durability = durability
        self.direct = direct

    def backend(self, threads: int = 3) -> FileBackend:
        # Disable the quota, so that a full disk does not make the sweep delete objects.
        options = FileOptions(
            durability=self.durability, direct=self.direct, threads=threads, quota_bytes=0
        )
        return FileBackend(self.root, options)

    @contextmanager
    def files(self) -> Generator[ObjectFiles]:
        """Yield `ObjectFiles` of the store, opened as the threads of a backend open them."""
        files = ObjectFiles(self.root, self.durability, direct=self.direct)
        files.open()
        try:
            yield files
        finally:
            files.close()

    def path(self, name: ObjectName) -> Path:
        return self.root / object_path(name.namespace, digest_of(name))

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        flip(self.path(name), 8 * (BLOCK_BYTES + at) + 3)

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        self.path(other).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.path(name), self.path(other))

    def objects(self) -> list[Path]:
        return [path for path in (self.root / "objects").rglob("*") if not path.is_dir()]

    def temporary(self) -> list[Path]:
        return list((self.root / "temporary").iterdir())

    def quarantined(self) -> list[Path]:
        return list((self.root / "quarantine").iterdir())


def sweeper_of(backend: StorageBackend) -> Sweeper:
    """Return the sweeper of a backend, so that a test can run sweeps itself."""
    assert isinstance(backend, FileBackend)
    sweeper = backend._sweeper  # pyright: ignore[reportPrivateUsage]
    assert sweeper is not None
    return sweeper


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def flip(path: Path, bit: int) -> None:
    path.write_bytes(flipped(path.read_bytes(), bit))


def modes_in(root: Path) -> set[tuple[str, int]]:
    """Return the type and permission bits of every file and directory in `root`, `root` included."""
    return {
        ("directory" if path.is_dir() else "file", stat.S_IMODE(path.stat().st_mode))
        for path in [root, *root.rglob("*")]
    }


def descriptors_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def files_open_below(root: Path) -> list[Path]:
    """Return the paths in `root` that this process has open."""
    targets: list[Path] = []
    for link in Path("/proc/self/fd").iterdir():
        # Ignore a descriptor that another thread has closed since the listing.
        with suppress(FileNotFoundError):
            targets.append(link.readlink())
    return [target for target in targets if target.is_relative_to(root)]


@contextmanager
def no_umask() -> Generator[None]:
    """Set the umask to 0 for the block, so that it does not restrict the mode of a new file."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def limited(what: int, most: int) -> Generator[None]:
    """Set a limit of this process, such as `RLIMIT_FSIZE`, for the block."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def failing(error: int = errno.EIO) -> Callable[..., NoReturn]:
    """Return a replacement for a system call that always fails with this errno."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(error, os.strerror(error))

    return fail


def open_refusing(refuses: Callable[[str, int], bool], error: int) -> Callable[..., int]:
    """Return a replacement for `os.open` that fails with `error` if `refuses(path, flags)` is true."""

    def instead(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if refuses(str(path), flags):
            raise OSError(error, os.strerror(error))
        return _open(path, flags, *args, **named)

    return instead


open_without_unnamed_files = open_refusing(
    lambda _, flags: flags & os.O_TMPFILE == os.O_TMPFILE, errno.EOPNOTSUPP
)
"""Replacement for `os.open` that behaves as on a filesystem without O_TMPFILE."""


def forbid_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", open_without_unnamed_files)


@pytest.fixture(params=["unnamed", "named"])
def each_kind_of_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with and without O_TMPFILE."""
    if request.param == "named":
        forbid_unnamed_files(monkeypatch)


def move_few_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Make every read and write transfer only some of the requested bytes, chosen at random."""
    draw, preadv, pwritev = random.Random(seed), os.preadv, os.pwritev

    def some(views: Any) -> list[memoryview]:
        first = next(view for view in views if len(view))
        return [memoryview(first)[: draw.randint(1, 40 * KIB)]]

    def read_some(fd: int, views: Any, at: int) -> int:
        return preadv(fd, some(views), at)

    def write_some(fd: int, views: Any, at: int) -> int:
        return pwritev(fd, some(views), at)

    monkeypatch.setattr(os, "preadv", read_some)
    monkeypatch.setattr(os, "pwritev", write_some)


class Gate:
    """Blocks all calls of one function of the module `os` until the test opens the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str = "preadv") -> None:
        self._function: Callable[..., Any] = getattr(os, function)
        self._entered = threading.Event()
        self._opened = threading.Event()
        monkeypatch.setattr(os, function, self._pass)

    def _pass(self, *arguments: Any, **named: Any) -> Any:
        self._entered.set()
        assert self._opened.wait(HEALTHY_S)
        return self._function(*arguments, **named)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, HEALTHY_S)

    def open(self) -> None:
        self._opened.set()
