"""What lies in which file, and in what order, when several objects share one. Asks no store."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...page_format.object_header import HEADER_BYTES, encode_object
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ..page_index.contract import NOTHING, Entry
from .ranges import REQUEST_BYTES_MAX, Range, StoredPlace

PACK_BYTES_MAX: Final = 64 << 20
"""A file gets no further object beyond this length."""

_PATH: Final = re.compile(r"packs/[0-9a-f]{2}/[0-9a-f]{32}-([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class NewObject:
    """An object that is to be stored."""

    number: int
    """Which write of its call it is, from 0."""
    name: ObjectName
    digest: bytes
    buffers: Sequence[memoryview]
    shape: ObjectShape
    replaces: int
    """The generation of the entry that it is to take the place of."""

    def replacing(self, generation: int) -> "NewObject":
        """Return the same, in the place of an entry of this generation."""
        return replace(self, replaces=generation)

    def united(self, payload: memoryview, present: int) -> "NewObject":
        """Return the same, with the columns of another object's payload that it lacks."""
        buffers = [self.shape.unite(self.buffers, payload, present)]
        return replace(self, buffers=buffers, shape=self.shape.with_columns(present))


@dataclass(frozen=True, slots=True)
class PackFile:
    """A file of several objects, one after the other, each with its header."""

    path: str
    content: bytes
    """A copy: the client may send it later than anybody waits."""
    news: Sequence[NewObject]
    offsets: Sequence[int]

    @staticmethod
    def of(news: Sequence[NewObject]) -> "PackFile":
        """Return a file of these objects under a name that nobody else has."""
        pieces: list[bytes | memoryview] = []
        offsets: list[int] = []
        at = 0
        for new in news:
            offsets.append(at)
            pieces += [encode_object(new.name, new.digest, new.buffers, new.shape), *new.buffers]
            at += HEADER_BYTES + new.shape.nbytes
        return PackFile(new_path(len(news)), b"".join(pieces), news, offsets)

    def entry(self, at: int) -> Entry:
        """Return what the index is to know of one of the objects, still without a generation."""
        new, offset = self.news[at], self.offsets[at]
        return Entry(new.digest, self.path, offset, new.shape.nbytes, new.shape.present, NOTHING)


def new_path(objects: int) -> str:
    """Return a path for a file of so many objects that nobody else has."""
    token = secrets.token_hex(16)
    return f"packs/{token[:2]}/{token}-{objects}"


def objects_in(path: str) -> int:
    """Return how many objects a file had when it was stored; 0 if this is no path of one."""
    path_of_pack = _PATH.fullmatch(path)
    return 0 if path_of_pack is None else int(path_of_pack[1])


def place_of(entry: Entry) -> StoredPlace:
    """Return where an entry says that the object is."""
    return StoredPlace(entry.place, entry.offset, HEADER_BYTES + entry.length)


def cut_packs(news: Sequence[NewObject], pages_max: int) -> list[list[NewObject]]:
    """Cut what is to be stored into files of one namespace, pool and shard each.

    What is read together was written together, in that order, by the same shard of the same model.
    """
    packs: list[list[NewObject]] = []
    filling: dict[tuple[str, str, str], tuple[list[NewObject], int]] = {}
    for new in news:
        kind = (new.name.namespace, new.name.pool, new.name.shard)
        pack, size = filling.get(kind, (None, 0))
        nbytes = HEADER_BYTES + new.shape.nbytes
        if pack is None or len(pack) >= pages_max or size + nbytes > PACK_BYTES_MAX:
            pack, size = list[NewObject](), 0
            packs.append(pack)
        pack.append(new)
        filling[kind] = (pack, size + nbytes)
    return packs


def cut_reads(wanted: Sequence[tuple[Entry, Sequence[Range]]]) -> list[list[int]]:
    """Cut reads into groups of one file each that are small enough for one request.

    Gives the positions in `wanted`, in the order in which the objects lie in their files.
    """
    groups: list[list[int]] = []
    place, begin = "", 0
    order = sorted(range(len(wanted)), key=lambda at: wanted[at][0][1:3])
    for at in order:
        entry, ranges = wanted[at]
        end = ranges[-1].end
        if not groups or entry.place != place or end - begin > REQUEST_BYTES_MAX:
            groups.append([])
            place, begin = entry.place, ranges[0].start
        groups[-1].append(at)
    return groups
