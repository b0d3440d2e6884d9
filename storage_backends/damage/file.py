"""Damage to the objects of `file://`: the file of an object is changed in place."""

import os
import stat
from functools import partial
from pathlib import Path

from ...page_format.object_name import ObjectName, name_digest, object_path
from ..file.backend import FileBackend
from ..thread_calls import Stop
from .damage import Damage


async def damage_object(backend: FileBackend, damage: Damage, deadline: float) -> bool:
    """Damage a stored object; see `stores.Damager`."""
    if backend.read_only:
        return False
    work = partial(_damage, backend.root, damage)
    return await backend.on_thread(work, late=False, deadline=deadline)


def damage_file(path: Path, damage: Damage, other: Path | None) -> bool:
    """Damage the file of an object in place; `other` is that of the other one. Blocks."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "r+b") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return False
            damaged = damage.apply(file.read(), None if other is None else other.read_bytes())
            if damaged is None:
                return False
            file.seek(0)
            file.write(damaged)
            file.truncate()
    except OSError:
        return False
    return True


def _damage(root: Path, damage: Damage, stop: Stop) -> bool:
    path = _path(root, damage.name)
    if path is None or stop.due():
        return False
    other = None if damage.other is None else _path(root, damage.other)
    return damage_file(path, damage, other)


def _path(root: Path, name: ObjectName) -> Path | None:
    digest = name_digest(name)
    return None if digest is None else root / object_path(name.namespace, digest)
