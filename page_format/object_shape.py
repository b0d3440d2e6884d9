"""The parts of a stored object, each of which can be read and verified separately.

An object is a page as one rank wrote it. Its *parts* do not depend on the TP size: one part for the
replicated columns, and one for each unit of KV heads (the smallest range of heads that a rank can
hold). Each optional column has separate parts. A rank can therefore assemble its share of a page from
whole parts of objects that groups of other TP sizes wrote.

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
"""The presence-bit value of parts that every object has, whatever its optional columns."""
PARTS_MAX: Final = 143
"""The maximum number of parts in an object: the header has room for this many."""
PART_BYTES_MAX: Final = (1 << 32) - 1


class Part(NamedTuple):
    """One part of an object: its length, and the presence bit of its optional column."""

    nbytes: int
    bit: int = ALWAYS


class PartRun(NamedTuple):
    """A run of consecutive parts in an object's payload, all of which the caller wants."""

    offset: int
    """The offset of the run's first part in the payload, in bytes."""
    nbytes: int
    parts: tuple[tuple[int, int], ...]
    """For each part of the run: (its index among the parts that the object has, its length in bytes).
    """


class Plan(NamedTuple):
    """The positions of the caller's parts in an object with given presence bits."""

    payload_bytes: int
    table: bytes
    """The list of parts that the object's header must contain, as encoded by `part_table`."""
    runs: tuple[PartRun, ...]
    sizes: tuple[int, ...] = ()
    """The lengths of the caller's parts in bytes, in order."""


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
        """Return the shape of an object that has a single part, which the caller holds."""
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
    def known_by_length(self) -> bool:
        """Whether a payload's length alone proves that the object has exactly the caller's columns."""
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
        """Whether the caller holds all parts of an object with just the caller's optional columns."""
        return self.held == tuple(self.numbers(self.present))

    def knows(self, present: int) -> bool:
        """Return whether every bit of `present` belongs to an optional column of this shape."""
        return not present & ~self._known

    def lacks(self, present: int) -> bool:
        """Return whether an object with bits `present` lacks an optional column of the caller."""
        return bool(self.present & ~present)

    def payload_bytes(self, present: int) -> int:
        """Return the payload length in bytes of an object with the presence bits `present`."""
        return sum(self.parts[number].nbytes for number in self.numbers(present))

    def plan(self, present: int) -> Plan:
        """Return the positions of the caller's parts in an object with the presence bits `present`.

        Parts that the object lacks are omitted.
        """
        plan = self._plans.get(present)
        if plan is None:
            plan = self._plans[present] = self._make_plan(present)
        return plan

    def with_columns(self, present: int) -> "ObjectShape":
        """Return a shape that also holds the parts of the optional columns in the mask `present`."""
        return self.of_columns(self.present | present)

    def of_columns(self, present: int) -> "ObjectShape":
        """Return a shape in which the caller holds exactly the parts that the bits `present` select."""
        return ObjectShape(self.parts, tuple(self.numbers(present)))

    def unite(self, buffers: Sequence[memoryview], payload: memoryview, present: int) -> memoryview:
        """Merge the caller's parts with those parts of another object that the caller lacks.

        `payload` and `present` belong to the other object. The returned payload has all parts of the
        columns that either of the two has.
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
        """Return the indices of the parts of an object with the bits `present`, ascending."""
        return [
            number
            for number, part in enumerate(self.parts)
            if part.bit == ALWAYS or present >> part.bit & 1
        ]


def part_table(parts: Sequence[Part]) -> bytes:
    """Encode parts as the part table of a header: all lengths, then all presence bits."""
    lengths = struct.pack(f"<{len(parts)}I", *(part.nbytes for part in parts))
    return lengths + struct.pack(f"<{len(parts)}b", *(part.bit for part in parts))


def parts_of(table: bytes) -> list[Part]:
    """Return the parts that a header's part table lists."""
    count = len(table) // 5
    lengths = struct.unpack_from(f"<{count}I", table)
    bits = struct.unpack_from(f"<{count}b", table, 4 * count)
    return [Part(nbytes, bit) for nbytes, bit in zip(lengths, bits, strict=True)]


def pieces_of(buffers: Sequence[memoryview], sizes: Sequence[int]) -> Iterator[list[memoryview]]:
    """Yield the concatenation of `buffers` in pieces of these sizes; each piece is a list of views."""
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
