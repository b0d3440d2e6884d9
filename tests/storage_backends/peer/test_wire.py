"""What is on the wire: whatever comes, it is a message or the one error, and costs no memory."""

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import StorageError
from lockstep.storage_backends.peer.wire import (
    CONTROL_BYTES_MAX,
    NAMES_MAX,
    PREFIX_BYTES,
    RANKS_MAX,
    Ask,
    Done,
    Fetch,
    Forget,
    Hello,
    Locate,
    Located,
    Message,
    Pages,
    PeerRank,
    Prefix,
    Told,
    decode,
    decode_prefix,
    decode_rank,
    encode,
    encode_rank,
)

RANK = PeerRank("10.0.0.1:7000", (("kv", "l0-4.h0-2"), ("sharding", "stage0of1.tp2")))
MESSAGES: list[Message] = [
    Hello(1, "ab" * 32, (RANK, RANK._replace(address="[fe80::1]:7001", engine="rdma://h:1"))),
    Ask(1, "kv", "l0-4.h0-2", ("00" * 32, "11" * 32)),
    Fetch(2, "kv", "l0-4.h0-2", b"\0" * 10, b"\0\1", ("00" * 32,)),
    Forget(3),
    Told(4, b"\0\1"),
    Pages(5, 17, b"\0\1\2"),
    Locate(2, "kv", "l0-4.h0-2", b"\0" * 10, b"\0\1", ("00" * 32,)),
    Located(2, b"\0\2", (0, 1 << 47)),
    Done(2),
]

REFUSED: list[tuple[object, str]] = [
    ([10], "unknown kind 10"),
    ([True, 1], "in place of a number"),
    ([4, -1], "in place of a number"),
    ([4, True], "in place of a number"),
    ([4], "fewer fields"),
    ([4, 1, 1], "more fields"),
    ([2, 1, "kv", "s", []], "asks for nothing"),
    ([2, 1, "kv", "s", ["k"] * NAMES_MAX + ["k"]], "no msgpack"),
    ([2, 1, "k" * 129, "s", ["k"]], "up to 128 characters"),
    ([2, 1, b"kv", "s", ["k"]], "up to 128 characters"),
    ([3, 1, "kv", "s", bytes(716), b"", ["k"]], "up to 715 bytes"),
    ([3, 1, "kv", "s", "", b"", ["k"]], "up to 715 bytes"),
    ([5, 1, bytes(NAMES_MAX + 1)], "up to 1024 bytes"),
    ([1, 0, "ab", []], "rank 0 of 0"),
    ([1, 2, "ab", [["h:1", [], ""]]], "rank 2 of 1"),
    ([1, 0, "ab", [["h", [], ""]]], "write host:port"),
    ([1, 0, "ab", [["h:1", [], "h:2"]]], "'h:2' is no engine; it begins with tcp:// or rdma://"),
    ([1, 0, "ab", [["h:1", [], "tcp://h"]]], "write host:port"),
    ([8, 1, b"\2", [-1]], "in place of numbers"),
    ([8, 1, b"\2", [True]], "in place of numbers"),
    ([1, 0, "ab", [["h:1", [["kv"]]]]], "fewer fields"),
    ([1, 0, "ab", [["h:1", [["kv", "s"]] * 65]]], "65 items; 64 is the most"),
    ([1, 0, "ab", ["h:1"] * (RANKS_MAX + 1)], "no msgpack"),
    ([1, 0, "ab", "h"], "in place of a list"),
    ({}, "no array"),
]
"""What is no message, and what is said of it."""

plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
anything = st.recursive(
    plain | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)
Outcome = Message | StorageError | PeerRank | Prefix


def read(control: bytes) -> Outcome:
    """The message, or the one error that there may be."""
    try:
        return decode(memoryview(control))
    except StorageError as error:
        return error


def control_of(message: Message) -> bytes:
    return encode(message)[PREFIX_BYTES:]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_a_message_comes_back_as_it_was_written(message: Message) -> None:
    raw = encode(message, attached_bytes=1 << 40)

    assert decode_prefix(memoryview(raw)[:PREFIX_BYTES]) == (len(raw) - PREFIX_BYTES, 1 << 40)
    assert decode(memoryview(raw)[PREFIX_BYTES:]) == message


def test_a_rank_comes_back_as_it_was_written() -> None:
    assert decode_rank(encode_rank(RANK)) == RANK


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_the_one_error(control: bytes) -> None:
    assert isinstance(read(control), Message | StorageError)


@given(st.lists(anything, max_size=7))
def test_any_array_is_a_message_or_the_one_error(fields: list[Any]) -> None:
    assert isinstance(read(msgpack.packb(fields, unicode_errors="surrogatepass")), Outcome)


@given(st.integers(1, 6), st.lists(anything, max_size=7))
def test_any_fields_of_a_known_kind_are_a_message_or_the_one_error(
    kind: int, fields: list[Any]
) -> None:
    packed = msgpack.packb([kind, *fields], unicode_errors="surrogatepass")

    assert isinstance(read(packed), Message | StorageError)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_that_is_cut_short_is_the_one_error(
    message: Message, data: st.DataObject
) -> None:
    control = control_of(message)
    length = data.draw(st.integers(0, len(control) - 1))

    assert isinstance(read(control[:length]), StorageError)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_a_byte_changed_is_a_message_or_the_one_error(
    message: Message, data: st.DataObject
) -> None:
    control = bytearray(control_of(message))
    control[data.draw(st.integers(0, len(control) - 1))] = data.draw(st.integers(0, 255))

    assert isinstance(read(bytes(control)), Message | StorageError)


@given(st.sampled_from(MESSAGES))
def test_a_message_with_more_behind_it_is_the_one_error(message: Message) -> None:
    assert isinstance(read(control_of(message) + b"\0"), StorageError)


@pytest.mark.parametrize(
    "control",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x03\xff\xff" * 5000,
        b"\xdc\x04\x00" * 5000,
        b"\x92\x05\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * CONTROL_BYTES_MAX,
    ],
    ids=["array", "arrays", "within", "bytes", "text", "map", "extension", "depth"],
)
def test_what_a_message_claims_to_be_long_is_not_allocated(control: bytes) -> None:
    tracemalloc.start()
    outcome = read(control)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert isinstance(outcome, StorageError)
    assert most < 32 << 20


@pytest.mark.parametrize("control_bytes", [0, CONTROL_BYTES_MAX + 1, (1 << 32) - 1])
def test_a_message_of_an_impossible_length_is_refused_before_it_is_received(
    control_bytes: int,
) -> None:
    prefix = control_bytes.to_bytes(4, "little") + bytes(8)

    with pytest.raises(StorageError, match=f"a message of {control_bytes} bytes"):
        decode_prefix(memoryview(prefix))


@pytest.mark.parametrize(
    ("fields", "said"),
    REFUSED,
)
def test_what_does_not_fit_the_schema_is_refused_by_what_is_wrong(
    fields: object, said: str
) -> None:
    with pytest.raises(StorageError, match=said):
        decode(memoryview(msgpack.packb(fields)))


def test_a_message_that_is_too_long_is_not_written() -> None:
    names = tuple(["k" * 1000] * NAMES_MAX)

    with pytest.raises(StorageError, match=f"{CONTROL_BYTES_MAX} is the most"):
        encode(Ask(1, "kv", "s", names))
