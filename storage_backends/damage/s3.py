"""Damage to the objects of `s3://`: other bytes are stored in the place of an object's version.

Where several objects share a file, the damaged bytes get a file of their own and the index leads there,
so that the neighbours stay sound.
"""

from contextlib import suppress

from ...errors import StorageError
from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_name import name_digest
from ..page_index.contract import CommitOutcome, Entry
from ..s3.backend import S3Backend
from ..s3.objects import path_of
from ..s3.pack_files import new_path
from ..s3.packs import S3Packs
from ..s3.ranges import Fetched, Range
from ..s3.requests import S3Requests
from .damage import Damage


async def damage_object(backend: S3Backend, damage: Damage, deadline: float) -> bool:
    """Damage a stored object; see `stores.Damager`."""
    done = False

    async def work() -> None:
        nonlocal done
        requests, layout = backend.requests, backend.layout
        with suppress(StorageError):
            if isinstance(layout, S3Packs):
                done = await _damage_packed(requests, layout, damage)
            else:
                done = await _damage_alone(requests, damage)

    if not backend.read_only:
        await backend.run(work, deadline)
    return done


async def _damage_alone(requests: S3Requests, damage: Damage) -> bool:
    """Damage an object that has a file of its own. Raises `StorageError`."""
    path = path_of(damage.name)
    found = None if path is None else await _file(requests, path)
    if path is None or found is None:
        return False
    path_of_other = None if damage.other is None else path_of(damage.other)
    other = path_of_other and await _file(requests, path_of_other)
    damaged = damage.apply(_bytes(found), _bytes(other) if other else None)
    return damaged is not None and await requests.replace(path, damaged, found.e_tag)


async def _file(requests: S3Requests, path: str) -> Fetched | None:
    """Return a whole file, or None if there is none. It is one that this program wrote itself."""
    there = await requests.size(path)
    return there and await requests.fetch(path, [Range(0, there[0])])


def _bytes(file: Fetched) -> bytes:
    return bytes(file.cut(0, file.size) or b"")


async def _damage_packed(requests: S3Requests, packs: S3Packs, damage: Damage) -> bool:
    """Damage an object that may share its file with others. Raises `StorageError`."""
    names = [damage.name, damage.name if damage.other is None else damage.other]
    entry, other = await packs.index.look_up([name_digest(name) or b"" for name in names])
    content = entry and await _content(requests, entry)
    if entry is None or not content:
        return False
    damaged = damage.apply(content, other and await _content(requests, other))
    if damaged is None:
        return False
    path = new_path(1)
    await requests.create(path, damaged)
    moved = entry._replace(place=path, offset=0)
    return await packs.index.commit([(moved, entry.generation)]) == [CommitOutcome.DONE]


async def _content(requests: S3Requests, entry: Entry) -> bytes | None:
    """Return the bytes of an object as they are stored, with its header."""
    end = entry.offset + HEADER_BYTES + entry.length
    fetched = await requests.fetch(entry.place, [Range(entry.offset, end)])
    content = None if fetched is None else fetched.cut(entry.offset, end)
    return None if content is None else bytes(content)
