"""The parts of a stored object, each of which can be read and verified separately.

An object is a page as one rank wrote it. Its *parts* are common to ranks of any TP size: the replicated
columns, one part per unit of KV heads, and the same for each optional column. A rank can therefore
assemble its share of a page from whole parts of objects of groups of other TP sizes.

Engines that share a store need not keep the same columns. For example, the KV of a draft model exists
only in engines that run one (rule R5). *Presence bits* record which optional columns an object has: bit
i is the i-th optional column of the layout. The parts that are present lie back to back.

This module is pure. All lengths come from the layout; an object supplies only its presence bits.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from ..errors import InternalError

ALWAYS: Final = -1
"""Replaces the presence bit for parts that every object has."""
PARTS_MAX: Final = 143
"""The number of parts that fit into a header block."""
PART_BYTES_MAX: Final = (1 << 32) - 1


class Part(NamedTuple):
    """One part of an object."""

    nbytes: int
    bit: int = ALWAYS


class PartRun(NamedTuple):
    """Consecutive parts in an object's payload that are all wanted."""

    offset: int
    """The offset of the first part in the payload."""
    nbytes: int
    parts: tuple[tuple[int, int], ...]
    """For each part: its index among the parts that the object has, and its length."""


class Plan(NamedTuple):
    """The location of the wanted parts in an object with given columns."""

    payload_bytes: int
    table: bytes
    """The part table that the object's header must contain."""
    runs: tuple[PartRun, ...]
    sizes: tuple[int, ...] = ()
    """The lengths of the wanted parts, in order."""


@dataclass(frozen=True)
class ObjectShape:
    """The parts that objects of one kind may have, and the subset that a caller holds.

    `held` lists the indices of the caller's parts in `parts`, ascending. The caller's buffers contain
    exactly these parts, back to back.
    """

    parts: tuple[Part, ...]
    held: tuple[int, ...]
    _plans: dict[int, Plan] = field(default_factory=dict[int, Plan], compare=False, repr=False)

    def __post_init__(self) -> None:
        fits = all(0 <= part.nbytes <= PART_BYTES_MAX for part in self.parts)
        if not fits or len(self.parts) > PARTS_MAX:
            raise InternalError(f"an object cannot have these {len(self.parts)} parts")
        ascending = all(one < two for one, two in zip(self.held, self.held[1:], strict=False))
        if not (self.held and ascending and 0 <= self.held[0] <= self.held[-1] < len(self.parts)):
            raise InternalError(
                f"parts {self.held} are not in an object with {len(self.parts)} parts"
            )

    @staticmethod
    def whole(nbytes: int) -> "ObjectShape":
        """Return the shape of an object with a single part, which the caller holds."""
        return ObjectShape((Part(nbytes),), (0,))

    @cached_property
    def nbytes(self) -> int:
        """The total length in bytes of the parts that the caller holds."""
        return sum(self.parts[number].nbytes for number in self.held)

    @cached_property
    def present(self) -> int:
        """The presence bits of the columns that the caller holds."""
        return _bits(self.parts[number] for number in self.held)

    @cached_property
    def _known(self) -> int:
        return _bits(self.parts)

    @cached_property
    def told_by_length(self) -> bool:
        """Whether the payload length alone identifies the caller's presence bits."""
        columns = sorted({part.bit for part in self.parts if part.bit != ALWAYS})
        room = {bit: sum(part.nbytes for part in self.parts if part.bit == bit) for bit in columns}
        if self.present in (0, self._known) and all(room.values()):
            return True
        ours = self.plan(self.present).payload_bytes
        subsets = range(1 << len(columns)) if len(columns) <= 4 else ()
        masks = [
            sum(1 << bit for at, bit in enumerate(columns) if each >> at & 1) for each in subsets
        ]
        return bool(masks) and sum(self.payload_bytes(mask) == ours for mask in masks) == 1

    @property
    def is_whole(self) -> bool:
        """Whether the caller holds all parts of an object with its presence bits."""
        return self.held == tuple(self.numbers(self.present))

    def knows(self, present: int) -> bool:
        """Return whether every bit of `present` belongs to a column of this shape."""
        return not present & ~self._known

    def lacks(self, present: int) -> bool:
        """Return whether an object with bits `present` lacks a column that the caller holds."""
        return bool(self.present & ~present)

    def payload_bytes(self, present: int) -> int:
        """Return the payload length of an object with the bits `present`."""
        return sum(self.parts[number].nbytes for number in self.numbers(present))

    def plan(self, present: int) -> Plan:
        """Return the location of the caller's parts in an object with the bits `present`.

        Parts that the object lacks are omitted.
        """
        plan = self._plans.get(present)
        if plan is None:
            plan = self._plans[present] = self._make_plan(present)
        return plan

    def with_columns(self, present: int) -> "ObjectShape":
        """Return the shape of a whole object that has these columns and the caller's."""
        return self.of_columns(self.present | present)

    def of_columns(self, present: int) -> "ObjectShape":
        """Return the shape of a whole object that has exactly these columns."""
        return ObjectShape(self.parts, tuple(self.numbers(present)))

    def unite(self, buffers: Sequence[memoryview], payload: memoryview, present: int) -> memoryview:
        """Merge the caller's parts with another object's parts that the caller lacks into one payload.

        `payload` and `present` belong to the other object. The result has the presence bits of both.
        """
        pieces = dict(_cut(self.parts, self.numbers(present), payload))
        pieces |= dict(_cut(self.parts, self.held, memoryview(b"".join(buffers))))
        return memoryview(b"".join(pieces[number] for number in sorted(pieces)))

    def _make_plan(self, present: int) -> Plan:
        held = set(self.held)
        runs: list[PartRun] = []
        run: list[tuple[int, int]] = []
        start = at = 0
        numbers = self.numbers(present)
        for there, number in enumerate(numbers):
            nbytes = self.parts[number].nbytes
            if number in held:
                start = start if run else at
                run.append((there, nbytes))
            elif run:
                runs.append(PartRun(start, at - start, tuple(run)))
                run = []
            at += nbytes
        if run:
            runs.append(PartRun(start, at - start, tuple(run)))
        table = part_table([self.parts[number] for number in numbers])
        sizes = tuple(nbytes for run in runs for _, nbytes in run.parts)
        return Plan(at, table, tuple(runs), sizes)

    def numbers(self, present: int) -> list[int]:
        """Return the indices of the parts of an object with these bits, ascending."""
        return [
            number
            for number, part in enumerate(self.parts)
            if part.bit == ALWAYS or present >> part.bit & 1
        ]


def part_table(parts: Sequence[Part]) -> bytes:
    """Return the lengths and presence bits of parts as encoded in a header."""
    lengths = struct.pack(f"<{len(parts)}I", *(part.nbytes for part in parts))
    return lengths + struct.pack(f"<{len(parts)}b", *(part.bit for part in parts))


def parts_of(table: bytes) -> list[Part]:
    """Return the parts that a `part_table` encodes."""
    count = len(table) // 5
    lengths = struct.unpack_from(f"<{count}I", table)
    bits = struct.unpack_from(f"<{count}b", table, 4 * count)
    return [Part(nbytes, bit) for nbytes, bit in zip(lengths, bits, strict=True)]


def pieces_of(buffers: Sequence[memoryview], sizes: Sequence[int]) -> Iterator[list[memoryview]]:
    """Cut the concatenation of `buffers` into runs of these sizes; each run is a few views."""
    at, offset = 0, 0
    for size in sizes:
        views: list[memoryview] = []
        missing = size
        while missing:
            buffer = buffers[at]
            width = min(missing, len(buffer) - offset)
            if width:
                views.append(buffer[offset : offset + width])
            missing -= width
            offset += width
            if offset == len(buffer):
                at, offset = at + 1, 0
        yield views


def _cut(
    parts: Sequence[Part], numbers: Sequence[int], payload: memoryview
) -> Iterator[tuple[int, memoryview]]:
    at = 0
    for number in numbers:
        nbytes = parts[number].nbytes
        yield number, payload[at : at + nbytes]
        at += nbytes


def _bits(parts: Iterable[Part]) -> int:
    return sum({1 << part.bit for part in parts if part.bit != ALWAYS})
