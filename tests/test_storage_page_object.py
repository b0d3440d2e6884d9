"""The header of a stored object: what it says, and that no flipped bit gets past it."""

import pytest

from lockstep.storage_backends.base import ObjectName
from lockstep.storage_backends.optional_columns import OptionalColumns
from lockstep.storage_backends.page_object import (
    HEADER_BYTES,
    PIECE_BYTES,
    Finding,
    check_header,
    check_payload,
    encode_header,
    join_checksums,
    name_digest,
    payload_checksum,
    piece_checksum,
    presence_bits,
)

PAYLOAD = bytes(range(256)) * 5
DIGEST = bytes(range(32))
HEADER = encode_header(DIGEST, len(PAYLOAD), payload_checksum(PAYLOAD))


def test_a_header_is_96_bytes_and_sound() -> None:
    assert len(HEADER) == HEADER_BYTES == 96
    assert check_header(HEADER, DIGEST, len(PAYLOAD)) is Finding.SOUND
    assert check_payload(HEADER, payload_checksum(PAYLOAD)) is Finding.SOUND


def test_the_format_is_what_it_was() -> None:
    """Stores outlive versions: whoever changes these bytes must change the format version."""
    assert HEADER.hex() == (
        "4c4f434b53544550010000006000000000050000000000000000000000000000"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "d92ab3a1cb0542a74844b009e164352e00000000000000005116c7b769e4b727"
    )


def test_the_format_of_presence_bits_is_what_it_was() -> None:
    """See above; a page without optional columns has the header that it always had."""
    header = encode_header(DIGEST, len(PAYLOAD), payload_checksum(PAYLOAD), 0b101)

    assert presence_bits(header) == 0b101
    assert header[:24] + header[32:88] == HEADER[:24] + HEADER[32:88]
    assert header[24:32].hex() == "0500000000000000"


@pytest.mark.parametrize(
    ("written", "asked", "finding"),
    [
        (0b00, 0b00, Finding.SOUND),
        (0b11, 0b11, Finding.SOUND),
        (0b01, 0b00, Finding.FULLER),
        (0b11, 0b10, Finding.FULLER),
        (0b00, 0b01, Finding.LACKING),
        (0b01, 0b10, Finding.LACKING),
    ],
)
def test_a_header_with_other_columns_than_were_asked_for_is_told_apart(
    written: int, asked: int, finding: Finding
) -> None:
    columns = OptionalColumns(nbytes=(100, 100), present=asked)
    header = encode_header(DIGEST, 1000 + 100 * written.bit_count(), bytes(16), written)
    longer = encode_header(DIGEST, 1001 + 100 * written.bit_count(), bytes(16), written)
    buffer_bytes = 1000 + 100 * asked.bit_count()

    assert check_header(header, DIGEST, buffer_bytes, columns) is finding
    assert check_header(header, bytes(32), buffer_bytes, columns) is Finding.NAME
    assert check_header(longer, DIGEST, buffer_bytes, columns) is Finding.LENGTH


def test_a_header_with_bits_of_columns_that_the_layout_does_not_have_is_refused() -> None:
    header = encode_header(DIGEST, 1000, bytes(16), 0b100)

    columns = OptionalColumns(nbytes=(100, 100))
    assert check_header(header, DIGEST, 1000, columns) is Finding.HEADER


def test_any_flipped_bit_of_a_header_is_found() -> None:
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(HEADER)
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert check_header(bytes(flipped), DIGEST, len(PAYLOAD)) is not Finding.SOUND, bit


@pytest.mark.parametrize("length", range(HEADER_BYTES))
def test_a_header_cut_anywhere_is_short(length: int) -> None:
    assert check_header(HEADER[:length], DIGEST, len(PAYLOAD)) is Finding.SHORT


def test_a_header_of_another_name_or_length_is_told_apart() -> None:
    assert check_header(HEADER, bytes(32), len(PAYLOAD)) is Finding.NAME
    assert check_header(HEADER, DIGEST, len(PAYLOAD) + 1) is Finding.LENGTH
    huge = encode_header(DIGEST, (1 << 64) - 1, bytes(16))
    assert check_header(huge, DIGEST, len(PAYLOAD)) is Finding.LENGTH


def test_a_header_of_another_version_or_with_reserved_bits_is_refused() -> None:
    import xxhash

    for offset, finding in ((8, Finding.VERSION), (10, Finding.HEADER), (24, Finding.HEADER)):
        changed = bytearray(HEADER[:88])
        changed[offset] ^= 2
        whole = bytes(changed) + xxhash.xxh3_64_intdigest(bytes(changed)).to_bytes(8, "little")
        assert check_header(whole, DIGEST, len(PAYLOAD)) is finding


def test_a_payload_with_a_flipped_bit_is_found() -> None:
    for bit in range(0, 8 * len(PAYLOAD), 37):
        flipped = bytearray(PAYLOAD)
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert check_payload(HEADER, payload_checksum(bytes(flipped))) is Finding.PAYLOAD


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_checksum_is_the_same_in_pieces_and_in_one(nbytes: int) -> None:
    payload = memoryview(bytes(nbytes))
    pieces = [
        piece_checksum(payload[start : start + PIECE_BYTES])
        for start in range(0, max(nbytes, 1), PIECE_BYTES)
    ]
    assert join_checksums(pieces) == payload_checksum(payload)


@pytest.mark.parametrize("part", ["", "A", "a/b", "..\n", "ü", "a b", "x" * 129])
def test_a_name_with_an_impossible_part_has_no_digest(part: str) -> None:
    for place in range(4):
        parts = ["ab", "cd", "kv", "l0-1.all"]
        parts[place] = part
        assert name_digest(ObjectName(*parts)) is None


def test_names_that_would_run_together_have_different_digests() -> None:
    digests = {
        name_digest(ObjectName(*parts))
        for parts in (("a", "bc", "d", "e"), ("ab", "c", "d", "e"), ("a", "b", "cd", "e"))
    }
    assert len(digests) == 3
