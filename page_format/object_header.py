"""The fixed binary header in front of every stored object's payload, and its verification.

    offset  size  field
         0     8  magic
         8     2  format version
        10     2  number of parts (see `object_shape`)
        12     4  length of the header in bytes
        16     8  length of the payload in bytes
        24     8  presence bits: which optional columns the payload has
        32    32  digest of the object's full name
        64     2  length of the full name
        66   515  the full name, then zeros
       581     3  zero
       584   715  the parts: their lengths (4 bytes each), then their presence bits (1 byte each)
      1299     5  zero
      1304  2288  the parts' checksums (XXH3, 128 bits each)
      3592   496  zero
      4088     8  checksum of the 4088 bytes before it (XXH3, 64 bits)

All integers are little-endian. The header contains the name, so an object copied or moved to another
name is detected, and a store can list its contents. Lengths are compared with expected lengths and
never used to allocate memory, so a corrupt header that claims terabytes costs nothing.

The header is a block of 4096 bytes, so the payload is aligned for direct I/O and for the page cache.
Filesystems store whole blocks, so a shorter header would save no space.

This module is pure: it does no I/O.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import xxhash

from .object_name import NAME_DIGEST_BYTES, ObjectName, full_name, name_digest
from .object_shape import ALWAYS, PARTS_MAX, ObjectShape, PartRun, Plan, parts_of, pieces_of

MAGIC: Final = b"LOCKSTEP"
FORMAT_VERSION: Final = 2
HEADER_BYTES: Final = 4096
_FIELDS: Final = struct.Struct("<8sHHIQQ32sH")
_FIRST: Final = struct.Struct("<8sHHIQQ")
_NAME_BYTES: Final = struct.Struct("<H")
_NAME_AT: Final = 66
_TABLE_AT: Final = 584
_CHECKSUMS_AT: Final = 1304
_CHECK: Final = struct.Struct("<Q")
_CHECK_AT: Final = HEADER_BYTES - _CHECK.size
CHECKSUM_BYTES: Final = 16
PIECE_BYTES: Final = 256 << 10
"""The approximate size in bytes of the pieces in which a payload is read and written.

A piece of this size is still in the CPU core's cache when it is hashed.
"""


class HeaderFinding(IntEnum):
    """The result of checking an object: sound, or the first defect found."""

    SOUND = 0
    SHORT = 1
    """The data ends within the header or within the payload."""
    LONG = 2
    """The object's data has extra bytes after the payload."""
    MAGIC = 3
    """The object was not written by Lockstep."""
    HEADER = 4
    """The header fails its checksum, or has presence bits for columns that the layout lacks."""
    VERSION = 5
    """The object has a format version that this code cannot read."""
    NAME = 6
    """The header states another name than the object was stored under."""
    LENGTH = 7
    """The object's part lengths differ from those that follow from the layout and the presence bits."""
    PAYLOAD = 8
    """A part fails its checksum."""
    KIND = 9
    """The path is not an object but a directory, a link or a device."""
    LACKING = 10
    """No defect was found, but the object has no data for an optional column that the caller needs."""


part_checksum = xxhash.xxh3_128_digest
"""Function that computes the checksum (`CHECKSUM_BYTES` bytes) of one part."""


def part_checksums(sizes: Sequence[int], views: Sequence[memoryview]) -> bytes:
    """Return the concatenated checksums of consecutive parts; `sizes` are the parts' lengths.

    The buffers `views`, concatenated, contain the parts back to back.
    """
    if len(sizes) == len(views) == 1:
        return xxhash.xxh3_128_digest(views[0])
    hashes = PartHashes(sizes)
    for view in views:
        hashes.add(view)
    return hashes.joined()


class PartHashes:
    """Computes checksums of consecutive parts, whose bytes are added in pieces of any size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = iter(sizes)
        self._left = 0
        self._begun: xxhash.xxh3_128 | None = None
        self._done: list[bytes] = []

    def add(self, piece: memoryview) -> None:
        """Add the next bytes of the parts to the checksums."""
        at, end = 0, len(piece)
        while at < end:
            if self._begun is None and not self._left:
                self._left = self._next()
            count = min(self._left, end - at)
            part = piece[at : at + count]
            at += count
            self._left -= count
            if self._begun is None and not self._left:
                # In the usual case the piece contains the whole part, so hash it in one call.
                self._done.append(xxhash.xxh3_128_digest(part))
                continue
            if self._begun is None:
                self._begun = xxhash.xxh3_128()
            self._begun.update(part)
            if not self._left:
                self._done.append(self._begun.digest())
                self._begun = None

    def joined(self) -> bytes:
        """Return the concatenated checksums of all parts, whose bytes must all have been added."""
        for size in self._sizes:
            assert not size
            self._done.append(xxhash.xxh3_128_digest(b""))
        return b"".join(self._done)

    def _next(self) -> int:
        for size in self._sizes:
            if size:
                return size
            self._done.append(xxhash.xxh3_128_digest(b""))
        raise AssertionError("there are more bytes than the parts have")


def encode_header(
    name: ObjectName, digest: bytes, present: int, plan: Plan, checksums: bytes
) -> bytes:
    """Return the header (`HEADER_BYTES` bytes) of a whole object.

    `digest` is the digest of `name`. `plan` describes the parts that the presence bits `present`
    select. `checksums` are the concatenated checksums of these parts.
    """
    text = full_name(name).encode("ascii")
    block = bytearray(_template(plan.payload_bytes, present, plan.table))
    block[_FIRST.size : _FIRST.size + NAME_DIGEST_BYTES] = digest
    _NAME_BYTES.pack_into(block, _NAME_AT - _NAME_BYTES.size, len(text))
    block[_NAME_AT : _NAME_AT + len(text)] = text
    block[_CHECKSUMS_AT : _CHECKSUMS_AT + len(checksums)] = checksums
    _CHECK.pack_into(block, _CHECK_AT, xxhash.xxh3_64_intdigest(memoryview(block)[:_CHECK_AT]))
    return bytes(block)


def check_header(header: memoryview, digest: bytes, shape: ObjectShape) -> HeaderFinding:
    """Check that `header` belongs to the object with this name digest and has the columns of `shape`.

    Returns SOUND even if the object has additional columns, and LACKING if columns are absent. The
    payload is not checked. `shape.plan(presence_bits(header))` locates the wanted parts, and
    `check_run` checks them.
    """
    if is_expected(header, digest, shape):
        return HeaderFinding.SOUND
    finding = _check_fields(header)
    if finding is not HeaderFinding.SOUND:
        return finding
    _, _, _, _, length, present, named, _ = _FIELDS.unpack_from(header)
    if named != digest:
        return HeaderFinding.NAME
    if not shape.knows(present):
        return HeaderFinding.HEADER
    plan = shape.plan(present)
    if length != plan.payload_bytes:
        return HeaderFinding.LENGTH
    if bytes(header[_TABLE_AT : _TABLE_AT + len(plan.table) + 1]) != plan.table + b"\0":
        return HeaderFinding.LENGTH
    return HeaderFinding.LACKING if shape.lacks(present) else HeaderFinding.SOUND


class ExpectedHeader:
    """Fast check of a header for the usual case: the object has exactly the columns of `shape`.

    A header that fails this check may still be sound; the caller must then parse it with
    `check_header`.
    """

    def __init__(self, shape: ObjectShape) -> None:
        plan = shape.plan(shape.present)
        self.payload_bytes = plan.payload_bytes
        self._first = _first_fields(plan.payload_bytes, shape.present, len(plan.table) // 5)
        self._table = plan.table + b"\0"
        self._sizes = plan.sizes
        self._checksums_end = _CHECKSUMS_AT + len(plan.sizes) * CHECKSUM_BYTES
        self.is_one_run = len(plan.runs) == 1 and shape.nbytes == plan.payload_bytes
        """Whether the caller holds all parts of an object that has exactly the caller's columns. The
        object's whole payload is then one run of the caller's parts."""

    def fits(self, header: bytes, digest: bytes) -> bool:
        """Return whether a header is sound, has the name digest `digest`, and the expected columns."""
        return (
            header.startswith(self._first + digest)
            and header.startswith(self._table, _TABLE_AT)
            and len(header) == HEADER_BYTES
            and _CHECK.unpack_from(header, _CHECK_AT)[0]
            == xxhash.xxh3_64_intdigest(memoryview(header)[:_CHECK_AT])
        )

    def stated(self, header: bytes) -> bytes:
        """Return the part checksums of a header for which `fits` is True."""
        return header[_CHECKSUMS_AT : self._checksums_end]

    def parts_of(self, payload: memoryview) -> list[memoryview]:
        """Split a whole payload into its parts."""
        if len(self._sizes) == 1:
            return [payload]
        ends = accumulate(self._sizes)
        return [payload[end - size : end] for size, end in zip(self._sizes, ends, strict=True)]


def is_expected(header: memoryview, digest: bytes, shape: ObjectShape) -> bool:
    """Return whether a header is sound, has this name digest, and states the columns of `shape`."""
    return ExpectedHeader(shape).fits(bytes(header), digest)


def presence_bits(header: memoryview | bytes) -> int:
    """Return the presence bits of a header that has passed its check."""
    present: int = _FIELDS.unpack_from(header)[5]
    return present


def stated_checksums(header: memoryview | bytes, first: int, count: int) -> bytes:
    """Return the checksums of `count` parts, beginning with part `first`, from a checked header."""
    start = _CHECKSUMS_AT + first * CHECKSUM_BYTES
    return bytes(header[start : start + count * CHECKSUM_BYTES])


def check_run(header: memoryview | bytes, run: PartRun, checksums: bytes) -> HeaderFinding:
    """Compare the checksums of a run of parts with those in a checked header.

    `checksums` are those of the run's parts, concatenated. Returns SOUND if they are equal, else
    PAYLOAD.
    """
    stated = stated_checksums(header, run.parts[0][0], len(run.parts))
    return HeaderFinding.SOUND if checksums == stated else HeaderFinding.PAYLOAD


class Statement(NamedTuple):
    """The name, presence bits and shape that a header states, not compared with any expectation."""

    name: ObjectName
    present: int
    shape: ObjectShape
    """The shape of the object. All of the object's parts are marked as held."""


def encode_object(
    name: ObjectName, digest: bytes, buffers: Sequence[memoryview], shape: ObjectShape
) -> bytes:
    """Return the header of the object whose parts are in `buffers`."""
    plan = shape.plan(shape.present)
    checksums = part_checksums(plan.sizes, buffers)
    return encode_header(name, digest, shape.present, plan, checksums)


def extract_parts(
    payload: memoryview, header: memoryview, buffers: Sequence[memoryview], shape: ObjectShape
) -> HeaderFinding:
    """Copy the caller's parts from an object's payload to `buffers`, and verify their checksums.

    `header` must have passed its check before.
    """
    plan = shape.plan(presence_bits(header))
    if len(payload) != plan.payload_bytes:
        return HeaderFinding.SHORT if len(payload) < plan.payload_bytes else HeaderFinding.LONG
    targets = pieces_of(buffers, [run.nbytes for run in plan.runs])
    for run, views in zip(plan.runs, targets, strict=True):
        hashes, at = PartHashes([nbytes for _, nbytes in run.parts]), run.offset
        for view in views:
            view[:] = payload[at : at + len(view)]
            hashes.add(view)
            at += len(view)
        if check_run(header, run, hashes.joined()) is not HeaderFinding.SOUND:
            return HeaderFinding.PAYLOAD
    return HeaderFinding.SOUND


def read_statement(header: memoryview) -> Statement | HeaderFinding:
    """Parse a header; return the name, presence bits and shape that it states, or its first defect."""
    finding = _check_fields(header)
    if finding is not HeaderFinding.SOUND:
        return finding
    _, _, count, _, length, present, digest, name_bytes = _FIELDS.unpack_from(header)
    try:
        parts = bytes(header[_NAME_AT : _NAME_AT + name_bytes]).decode("ascii").split("/")
        name = ObjectName(*parts)
    except (UnicodeDecodeError, TypeError):
        return HeaderFinding.NAME
    if name_digest(name) != digest:
        return HeaderFinding.NAME
    table = parts_of(bytes(header[_TABLE_AT : _TABLE_AT + 5 * count]))
    if sum(part.nbytes for part in table) != length or not count:
        return HeaderFinding.LENGTH
    columns = {part.bit for part in table} - {ALWAYS}
    if any(bit < 0 or not present >> bit & 1 for bit in columns):
        return HeaderFinding.LENGTH
    return Statement(name, present, ObjectShape(tuple(table), tuple(range(count))))


def check_object(raw: memoryview) -> Statement | HeaderFinding:
    """Verify an object (header, payload); return its name, presence bits and shape, or its defect."""
    if len(raw) < HEADER_BYTES:
        return HeaderFinding.SHORT
    statement = read_statement(raw[:HEADER_BYTES])
    if isinstance(statement, HeaderFinding):
        return statement
    payload = raw[HEADER_BYTES:]
    if len(payload) != statement.shape.nbytes:
        return HeaderFinding.SHORT if len(payload) < statement.shape.nbytes else HeaderFinding.LONG
    sizes = [part.nbytes for part in statement.shape.parts]
    if part_checksums(sizes, [payload]) != stated_checksums(raw, 0, len(sizes)):
        return HeaderFinding.PAYLOAD
    return statement


@lru_cache(maxsize=256)
def _first_fields(payload_bytes: int, present: int, parts: int) -> bytes:
    return _FIRST.pack(MAGIC, FORMAT_VERSION, parts, HEADER_BYTES, payload_bytes, present)


@lru_cache(maxsize=256)
def _template(payload_bytes: int, present: int, table: bytes) -> bytes:
    first = _first_fields(payload_bytes, present, len(table) // 5)
    return (first.ljust(_TABLE_AT, b"\0") + table).ljust(HEADER_BYTES, b"\0")


def _check_fields(header: memoryview) -> HeaderFinding:
    if len(header) < HEADER_BYTES:
        return HeaderFinding.SHORT
    magic, version, count, header_bytes, _, _, _, name_bytes = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        return HeaderFinding.MAGIC
    if version != FORMAT_VERSION:
        return HeaderFinding.VERSION
    (check,) = _CHECK.unpack_from(header, _CHECK_AT)
    if check != xxhash.xxh3_64_intdigest(header[:_CHECK_AT]):
        return HeaderFinding.HEADER
    fits = (
        header_bytes == HEADER_BYTES and count <= PARTS_MAX and name_bytes <= _TABLE_AT - _NAME_AT
    )
    return HeaderFinding.SOUND if fits else HeaderFinding.HEADER
