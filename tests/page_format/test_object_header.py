"""The header of a stored object: its fields, and detection of any flipped bit."""

import random
import struct
from collections.abc import Iterable, Iterator
from hashlib import sha256

import pytest
import xxhash

from lockstep.page_format.object_header import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    PIECE_BYTES,
    HeaderFinding,
    PartHashes,
    Statement,
    check_header,
    check_object,
    encode_header,
    encode_object,
    extract_parts,
    part_checksums,
    presence_bits,
    read_statement,
    stated_checksums,
)
from lockstep.page_format.object_name import ObjectName, name_digest
from lockstep.page_format.object_shape import ALWAYS, PARTS_MAX, ObjectShape, Part, Plan
from tests.kit.storage.calls import digest_of

NAME = ObjectName("ab" * 32, "cd" * 32, "kv", "l0-4.h0-2")
SHAPE = ObjectShape((Part(1000), Part(280), Part(100, 0), Part(100, 1), Part(7, 1)), (0, 1))
FULL = ObjectShape(SHAPE.parts, (0, 1, 2, 3, 4))
PAYLOAD = bytearray(bytes(range(256)) * 5)


DIGEST = digest_of(NAME)
HEADER = memoryview(encode_object(NAME, DIGEST, [memoryview(PAYLOAD)], SHAPE))


def encoded(shape: ObjectShape, name: ObjectName = NAME) -> bytes:
    """Return an encoded object with the columns of a shape."""
    payload = random.Random(1).randbytes(shape.nbytes)
    return encode_object(name, digest_of(name), [memoryview(payload)], shape) + payload


def sealed(header: bytes) -> memoryview:
    """Return a changed header with its checksum recomputed."""
    checked = header[: HEADER_BYTES - 8]
    return memoryview(checked + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little"))


def changed(offset: int, content: bytes, header: memoryview = HEADER) -> memoryview:
    """Return a header with other bytes at an offset, and a valid checksum."""
    return sealed(bytes(header[:offset]) + content + bytes(header[offset + len(content) :]))


def test_a_header_is_a_block_and_sound() -> None:
    buffer = bytearray(len(PAYLOAD))

    assert len(HEADER) == HEADER_BYTES == 4096
    assert check_header(HEADER, DIGEST, SHAPE) is HeaderFinding.SOUND
    assert (
        extract_parts(memoryview(PAYLOAD), HEADER, [memoryview(buffer)], SHAPE)
        is HeaderFinding.SOUND
    )
    assert buffer == PAYLOAD


def test_the_format_is_what_it_was() -> None:
    """The header's bytes are fixed, as stores outlive versions: a change needs a new format version."""
    payload_1, payload_2 = PAYLOAD[:1000], PAYLOAD[1000:]
    name = f"{'ab' * 32}/{'cd' * 32}/kv/l0-4.h0-2".encode()
    expected = bytearray(4096)
    expected[:8] = b"LOCKSTEP"
    expected[8:12] = bytes([2, 0, 2, 0])
    expected[12:16] = (4096).to_bytes(4, "little")
    expected[16:24] = (1280).to_bytes(8, "little")
    expected[32:64] = DIGEST
    expected[64:66] = len(name).to_bytes(2, "little")
    expected[66 : 66 + len(name)] = name
    expected[584:592] = (1000).to_bytes(4, "little") + (280).to_bytes(4, "little")
    expected[592:594] = b"\xff\xff"
    expected[1304:1336] = xxhash.xxh3_128_digest(payload_1) + xxhash.xxh3_128_digest(payload_2)
    expected[4088:] = xxhash.xxh3_64_intdigest(bytes(expected[:4088])).to_bytes(8, "little")

    assert bytes(HEADER) == bytes(expected)
    assert sha256(HEADER).hexdigest() == (
        "a07f0fe62f349eb4eb57d4234cc9a4ee1140640b6cc8902c68638ff65bb5d3b2"
    )


def test_a_header_says_which_optional_columns_the_payload_has() -> None:
    shape = ObjectShape(SHAPE.parts, (0, 1, 3, 4))
    header = encoded(shape)[:HEADER_BYTES]

    assert presence_bits(header) == 0b10
    assert header[24:32].hex() == "0200000000000000"
    assert header[10:12] == bytes([4, 0])
    assert header[584:600] == struct.pack("<4I", 1000, 280, 100, 7)
    assert header[600:604] == struct.pack("<4b", ALWAYS, ALWAYS, 1, 1)


@pytest.mark.parametrize(
    ("written", "requested", "finding"),
    [
        ((0, 1), (0, 1), HeaderFinding.SOUND),
        ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), HeaderFinding.SOUND),
        ((0, 1, 2), (0, 1), HeaderFinding.SOUND),
        ((0, 1, 2, 3, 4), (1, 4), HeaderFinding.SOUND),
        ((0, 1), (2,), HeaderFinding.LACKING),
        ((0, 1, 2), (0, 3), HeaderFinding.LACKING),
    ],
)
def test_a_header_with_other_columns_than_were_asked_for_is_told_apart(
    written: tuple[int, ...], requested: tuple[int, ...], finding: HeaderFinding
) -> None:
    shape = ObjectShape(SHAPE.parts, requested)
    header = memoryview(encoded(ObjectShape(SHAPE.parts, written)))[:HEADER_BYTES]
    length = sum(SHAPE.parts[number].nbytes for number in written)

    assert check_header(header, DIGEST, shape) is finding
    assert check_header(header, bytes(32), shape) is HeaderFinding.NAME
    longer = changed(16, (length + 1).to_bytes(8, "little"), header)
    assert check_header(longer, DIGEST, shape) is HeaderFinding.LENGTH


def test_a_header_with_bits_of_columns_that_the_layout_does_not_have_is_refused() -> None:
    header = memoryview(encoded(FULL))[:HEADER_BYTES]

    fewer = ObjectShape(SHAPE.parts[:3], (0, 1))
    assert check_header(header, DIGEST, fewer) is HeaderFinding.HEADER


@pytest.mark.parametrize("shape", [SHAPE, FULL], ids=["the very object", "part of it"])
def test_any_flipped_bit_of_a_header_is_found(shape: ObjectShape) -> None:
    taken = (HeaderFinding.SOUND, HeaderFinding.LACKING)
    header = encoded(FULL)[:HEADER_BYTES]

    not_found = [
        bit
        for bit, damaged in flipped(header, range(8 * HEADER_BYTES))
        if check_header(damaged, DIGEST, shape) in taken
        or not isinstance(read_statement(damaged), HeaderFinding)
    ]

    assert not_found == []


def flipped(raw: bytes, bits: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
    """For each bit, yield its number and the bytes with that bit flipped; the bytes are reused."""
    changed = bytearray(raw)
    for bit in bits:
        changed[bit // 8] ^= 1 << (bit % 8)
        yield bit, memoryview(changed)
        changed[bit // 8] ^= 1 << (bit % 8)


@pytest.mark.parametrize("length", [0, 1, 7, 66, 584, 1304, 2048, HEADER_BYTES - 1])
def test_a_header_cut_anywhere_is_short(length: int) -> None:
    assert check_header(HEADER[:length], DIGEST, SHAPE) is HeaderFinding.SHORT
    assert read_statement(HEADER[:length]) is HeaderFinding.SHORT
    assert check_object(HEADER[:length]) is HeaderFinding.SHORT


def test_a_header_of_another_name_or_length_is_told_apart() -> None:
    assert check_header(HEADER, bytes(32), SHAPE) is HeaderFinding.NAME
    longer = ObjectShape((Part(1000), Part(281), *SHAPE.parts[2:]), (0, 1))
    divided = ObjectShape((Part(1001), Part(279), *SHAPE.parts[2:]), (0, 1))
    others = (longer, divided, ObjectShape.whole(1280))
    assert {check_header(HEADER, DIGEST, other) for other in others} == {HeaderFinding.LENGTH}
    table = SHAPE.plan(0).table
    huge = encode_header(NAME, DIGEST, 0, Plan((1 << 64) - 1, table, ()), bytes(32))
    assert check_header(memoryview(huge), DIGEST, SHAPE) is HeaderFinding.LENGTH


@pytest.mark.parametrize(
    ("offset", "content", "finding"),
    [
        (0, b"M", HeaderFinding.MAGIC),
        (8, b"\1", HeaderFinding.VERSION),
        (8, b"\3", HeaderFinding.VERSION),
        (10, (PARTS_MAX + 1).to_bytes(2, "little"), HeaderFinding.HEADER),
        (12, (4096 * 2).to_bytes(4, "little"), HeaderFinding.HEADER),
        (24, bytes([0b100]), HeaderFinding.HEADER),
        (4000, b"x", HeaderFinding.SOUND),
    ],
)
def test_a_header_of_another_version_or_with_impossible_fields_is_refused(
    offset: int, content: bytes, finding: HeaderFinding
) -> None:
    """A header of another version or with impossible fields is refused; a set reserved byte is not."""
    assert check_header(changed(offset, content), DIGEST, SHAPE) is finding


@pytest.mark.parametrize("held", [(0, 1), (0, 1, 2), (0, 1, 3, 4), (0, 1, 2, 3, 4)], ids=str)
def test_a_statement_is_what_was_written(held: tuple[int, ...]) -> None:
    shape = ObjectShape(SHAPE.parts, held)
    raw = memoryview(encoded(shape))

    statement = check_object(raw)

    assert statement == read_statement(raw[:HEADER_BYTES])
    assert isinstance(statement, Statement)
    assert (statement.name, statement.present) == (NAME, shape.present)
    assert statement.shape.parts == tuple(SHAPE.parts[number] for number in held)
    assert statement.shape.is_whole


@pytest.mark.parametrize(
    ("offset", "content", "finding"),
    [
        (66, b"z", HeaderFinding.NAME),
        (66, b"/", HeaderFinding.NAME),
        (66, b"\xff", HeaderFinding.NAME),
        (64, b"\1", HeaderFinding.NAME),
        (64, (519).to_bytes(2, "little"), HeaderFinding.HEADER),
        (10, b"\0", HeaderFinding.LENGTH),
        (10, b"\1", HeaderFinding.LENGTH),
        (10, b"\3", HeaderFinding.LENGTH),
        (16, b"\1", HeaderFinding.LENGTH),
        (584, b"\0", HeaderFinding.LENGTH),
        (592, b"\0", HeaderFinding.LENGTH),
        (592, b"\x80", HeaderFinding.LENGTH),
        (593, b"\x7f", HeaderFinding.LENGTH),
    ],
)
def test_a_header_that_does_not_make_sense_states_nothing(
    offset: int, content: bytes, finding: HeaderFinding
) -> None:
    """A header with contradictory fields but a valid checksum yields a finding, not a statement."""
    assert read_statement(changed(offset, content)) is finding


def test_any_flipped_bit_of_an_object_and_any_other_length_is_found() -> None:
    raw = encoded(FULL)
    bits = [*range(8 * HEADER_BYTES, 8 * len(raw), 37), 8 * len(raw) - 1]

    assert {check_object(damaged) for _, damaged in flipped(raw, bits)} == {HeaderFinding.PAYLOAD}
    assert check_object(memoryview(raw[:-1])) is HeaderFinding.SHORT
    assert check_object(memoryview(raw + b"x")) is HeaderFinding.LONG
    assert isinstance(check_object(memoryview(raw)), Statement)


WANTED = ObjectShape(SHAPE.parts, (1, 3))
"""The wanted parts 1 and 3; they are bytes 1000-1279 and 1380-1479 of `FULL`'s payload."""


def extracted(payload: bytes) -> tuple[HeaderFinding, bytes]:
    """Extract the wanted parts; return the finding of the header check, and the extracted bytes."""
    header = memoryview(encoded(FULL))[:HEADER_BYTES]
    buffers = [memoryview(bytearray(nbytes)) for nbytes in (0, 279, 2, 99)]
    finding = extract_parts(memoryview(payload), header, buffers, WANTED)
    return finding, b"".join(buffers)


def damaged_at(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_parts_are_taken_out_of_a_payload_and_only_they_are_checked() -> None:
    content = encoded(FULL)[HEADER_BYTES:]
    inside = [*range(1000, 1280, 13), *range(1380, 1480, 13)]
    outside = [*range(0, 1000, 13), *range(1280, 1380, 13), *range(1480, len(content), 13)]
    sound = (HeaderFinding.SOUND, content[1000:1280] + content[1380:1480])

    assert {extracted(damaged_at(content, at)) for at in outside} == {sound}
    assert {extracted(damaged_at(content, at))[0] for at in inside} == {HeaderFinding.PAYLOAD}


@pytest.mark.parametrize("step", [1, 7, 100, 4096, PIECE_BYTES])
@pytest.mark.parametrize(
    "sizes", [(0,), (1,), (300, 0, 0, 5), (0, 4096, 1, 4095), (9000,)], ids=str
)
def test_checksums_are_the_same_in_pieces_and_in_one(sizes: tuple[int, ...], step: int) -> None:
    content = random.Random(7).randbytes(sum(sizes))
    parts = [content[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    expected = b"".join(xxhash.xxh3_128_digest(part) for part in parts)
    pieces = [memoryview(content[at : at + step]) for at in range(0, len(content), step)]

    hashes = PartHashes(sizes)
    for piece in pieces:
        hashes.add(piece)

    assert hashes.joined() == part_checksums(sizes, pieces) == expected
    assert len(expected) == CHECKSUM_BYTES * len(sizes)
    assert part_checksums(sizes, [memoryview(content)]) == expected


def test_a_header_has_room_for_as_many_parts_as_there_may_be() -> None:
    shape = ObjectShape((Part(3),) * PARTS_MAX, tuple(range(PARTS_MAX)))
    longest = ObjectName("a" * 128, "b" * 128, "c" * 128, "d" * 128)
    raw = memoryview(encoded(shape, longest))

    statement = check_object(raw)

    assert isinstance(statement, Statement)
    assert (statement.name, statement.shape) == (longest, shape)
    assert stated_checksums(raw, PARTS_MAX - 1, 1) == xxhash.xxh3_128_digest(raw[-3:])


@pytest.mark.parametrize("field", ["namespace", "key", "pool", "shard"])
@pytest.mark.parametrize("part", ["", "A", "a/b", "..\n", "ü", "a b", "x" * 129, "ab\n"])
def test_a_name_with_an_impossible_part_has_no_digest(part: str, field: str) -> None:
    name = ObjectName("ab", "cd", "kv", "l0-1.all")._replace(**{field: part})

    assert name_digest(name) is None
