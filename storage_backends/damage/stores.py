"""Which stores can be damaged, and by which module of this folder."""

from collections.abc import Awaitable, Callable
from functools import partial

from ..base import StorageBackend
from ..file.backend import FileBackend
from ..memory import MemoryBackend
from ..mooncake.backend import MooncakeBackend
from ..s3.backend import S3Backend
from ..three_fs.backend import ThreeFsBackend
from . import file, memory, mooncake, s3, three_fs
from .damage import Damage

Damager = Callable[[Damage, float], Awaitable[bool]]
"""Damages a stored object by a deadline; says whether it is there and other than it was.

False where that cannot be done, or not in time. Nothing tells readers of it."""


def damager_of(store: StorageBackend) -> Damager | None:
    """Return what damages the objects of this store; None for one of another package."""
    match store:
        case FileBackend():
            return partial(file.damage_object, store)
        case MemoryBackend():
            return partial(memory.damage_object, store)
        case MooncakeBackend():
            return partial(mooncake.damage_object, store)
        case S3Backend():
            return partial(s3.damage_object, store)
        case ThreeFsBackend():
            return partial(three_fs.damage_object, store)
        case _:
            return None
