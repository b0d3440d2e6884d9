"""What the tests of `file://` share: a store in a directory, and a kernel without unnamed files."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.page_format.object_name import ObjectName, name_digest, object_path
from lockstep.storage_backends.file.backend import FileBackend
from lockstep.storage_backends.file.contents import BLOCK_BYTES
from lockstep.storage_backends.file.objects import Durability

_open = os.open


class FileStore:
    """A store in `root`."""

    def __init__(
        self, root: Path, durability: Durability = Durability.NONE, *, direct: bool = False
    ) -> None:
        self.root = root
        self.durability = durability
        self.direct = direct

    def backend(self, threads: int = 3) -> FileBackend:
        return FileBackend(
            self.root, durability=self.durability, direct=self.direct, threads=threads
        )

    def path(self, name: ObjectName) -> Path:
        digest = name_digest(name)
        assert digest is not None
        return self.root / object_path(name.namespace, digest)

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


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def open_without_unnamed_files(path: Any, flags: int, *args: Any, **named: Any) -> int:
    """`os.open` as it is on a filesystem that has no unnamed files."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return _open(path, flags, *args, **named)


def forbid_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", open_without_unnamed_files)
