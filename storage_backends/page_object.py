"""The fixed binary header that goes before the bytes of every stored object, and its check.

    offset  size  field
         0     8  magic
         8     2  format version
        10     2  reserved, zero
        12     4  length of the header in bytes
        16     8  length of the payload in bytes
        24     8  presence bits: which optional columns the payload has (see `optional_columns`)
        32    32  digest of the object's full name
        64    16  checksum of the payload (XXH3, 128 bits; see `payload_checksum`)
        80     8  reserved, zero
        88     8  checksum of the 88 bytes before it (XXH3, 64 bits)

All integers are little-endian. The name is inside, so that an object that was copied or moved under
another name is found out. Lengths are compared with what the caller expects and never allocated,
so a header that claims terabytes costs nothing; an object with other optional columns has a length
that follows from its bits and the layout.

Everything here is pure: bytes in, bytes or a finding out.
"""

import re
import struct
from enum import IntEnum
from hashlib import blake2b
from typing import Final

import xxhash

from .base import ObjectName
from .optional_columns import NONE_OPTIONAL, OptionalColumns

MAGIC: Final = b"LOCKSTEP"
FORMAT_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sHHIQQ32s16sQ")
_CHECK: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
NAME_DIGEST_BYTES: Final = 32
PIECE_BYTES: Final = 256 << 10
"""A payload is hashed in pieces of this size, so that who reads it can hash each piece while it is
still in the core's cache."""

_PART: Final = "[a-z0-9.-]{1,128}"
_FULL_NAME: Final = re.compile(f"{_PART}/{_PART}/{_PART}/{_PART}")


class Finding(IntEnum):
    """What a check of an object found: sound, or the first thing that is wrong."""

    SOUND = 0
    SHORT = 1
    """There are fewer bytes than a header has, or than the payload needs."""
    LONG = 2
    """There are bytes behind the payload."""
    MAGIC = 3
    """It is not an object of Lockstep."""
    HEADER = 4
    """The header does not match its own checksum, a reserved field is not zero, or there are presence
    bits for columns that the layout does not have."""
    VERSION = 5
    """It was written in a format that this version does not read."""
    NAME = 6
    """It is the object of another name."""
    LENGTH = 7
    """Its payload has another length than follows from its columns."""
    PAYLOAD = 8
    """The payload does not match its checksum."""
    KIND = 9
    """What lies there is no object at all: a directory, a link, a device."""
    FULLER = 10
    """So far sound; it has the optional columns that were asked for, and others."""
    LACKING = 11
    """So far sound; it lacks an optional column that was asked for."""


def name_digest(name: ObjectName) -> bytes | None:
    """Return the 32-byte digest of the full name, or None if a part has a character it must not."""
    full_name = f"{name.namespace}/{name.key}/{name.pool}/{name.shard}"
    if _FULL_NAME.fullmatch(full_name) is None:
        return None
    return blake2b(full_name.encode("ascii"), digest_size=NAME_DIGEST_BYTES).digest()


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """Return the checksum of a whole payload, as it stands in the header (16 bytes)."""
    starts = range(0, max(len(payload), 1), PIECE_BYTES)
    return join_checksums(
        [piece_checksum(payload[start : start + PIECE_BYTES]) for start in starts]
    )


def piece_checksum(piece: memoryview | bytes) -> bytes:
    """Return the checksum of one piece: `PIECE_BYTES` bytes, or what is left at the end."""
    return xxhash.xxh3_128_digest(piece)


def join_checksums(pieces: list[bytes]) -> bytes:
    """Return the payload's checksum from its pieces': a single one itself, else one over all."""
    return pieces[0] if len(pieces) == 1 else xxhash.xxh3_128_digest(b"".join(pieces))


def encode_header(digest: bytes, payload_bytes: int, checksum: bytes, present: int = 0) -> bytes:
    """Return the header (`HEADER_BYTES` bytes) of a payload.

    `digest` is the `name_digest`, `checksum` the `payload_checksum`, `present` the presence bits.
    """
    fields = _FIELDS.pack(
        MAGIC, FORMAT_VERSION, 0, HEADER_BYTES, payload_bytes, present, digest, checksum, 0
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def check_header(
    header: memoryview | bytes,
    digest: bytes,
    payload_bytes: int,
    optional: OptionalColumns = NONE_OPTIONAL,
) -> Finding:
    """Say whether `header` is that of the object with this name, and how its columns compare.

    `payload_bytes` is the length of the caller's buffer, `optional` says which columns that has:
    SOUND if the object has the same ones, FULLER or LACKING if it has others. Does not look at the
    payload; call `check_payload` once it has been read.
    """
    if len(header) < HEADER_BYTES:
        return Finding.SHORT
    magic, version, zero, header_bytes, length, present, named, _, zero_too = _FIELDS.unpack_from(
        header
    )
    if magic != MAGIC:
        return Finding.MAGIC
    (check,) = _CHECK.unpack_from(header, _FIELDS.size)
    if check != xxhash.xxh3_64_intdigest(header[: _FIELDS.size]):
        return Finding.HEADER
    if version != FORMAT_VERSION:
        return Finding.VERSION
    if zero or zero_too or header_bytes != HEADER_BYTES or not optional.knows(present):
        return Finding.HEADER
    if named != digest:
        return Finding.NAME
    if present == optional.present:
        return Finding.SOUND if length == payload_bytes else Finding.LENGTH
    if length != optional.payload_bytes(payload_bytes, present):
        return Finding.LENGTH
    return Finding.LACKING if optional.lacks(present) else Finding.FULLER


def presence_bits(header: memoryview | bytes) -> int:
    """Return the presence bits of a (checked) header."""
    present: int = _FIELDS.unpack_from(header)[5]
    return present


def check_payload(header: memoryview | bytes, checksum: bytes) -> Finding:
    """Say whether a payload with this checksum is the one that the (checked) header speaks of."""
    stated: bytes = _FIELDS.unpack_from(header)[7]
    return Finding.SOUND if stated == checksum else Finding.PAYLOAD
