"""Wire format of `peer://`: any bytes decode to a message or raise one error type."""

from typing import Any

import msgspec
import pytest
from msgspec import structs

from lockstep.errors import StorageError
from lockstep.storage_backends.peer.wire import (
    CONTROL_BYTES_MAX,
    MESSAGES,
    NAMES_MAX,
    PREFIX_BYTES,
    RANKS,
    RANKS_MAX,
    Done,
    Forget,
    Hello,
    LocateReply,
    LocateRequest,
    LookupReply,
    LookupRequest,
    Message,
    PeerRank,
    ReadReply,
    ReadRequest,
    decode_prefix,
    encode,
)

RANK = PeerRank("10.0.0.1:7000", (("kv", "l0-4.h0-2"), ("sharding", "stage0of1.tp2")))
MESSAGES_SENT: list[Message] = [
    Hello(
        1, "ab" * 32, (RANK, structs.replace(RANK, address="[fe80::1]:7001", engine="rdma://h:1"))
    ),
    LookupRequest(1, "kv", "l0-4.h0-2", ("00" * 32, "11" * 32)),
    ReadRequest(2, "kv", "l0-4.h0-2", b"\0" * 10, b"\0\1", ("00" * 32,)),
    Forget(3),
    LookupReply(4, b"\0\1"),
    ReadReply(5, 17, b"\0\1\2"),
    LocateRequest(2, "kv", "l0-4.h0-2", b"\0" * 10, b"\0\1", ("00" * 32,)),
    LocateReply(2, b"\0\2", (0, 1 << 47)),
    Done(2),
]

REFUSED: list[tuple[Any, str]] = [
    ([10], "Invalid value 10"),
    ([4, -1], "Expected `int` >= 0"),
    ([4, 1, 1], "at most length 1, got 2"),
    ([2, 1, "kv", "s", []], "of length >= 1"),
    ([2, 1, "kv", "s", ["k"] * NAMES_MAX + ["k"]], "of length <= 1024"),
    ([2, 1, "k" * 129, "s", ["k"]], "`str` of length <= 128"),
    ([3, 1, "kv", "s", bytes(716), b"", ["k"]], "`bytes` of length <= 715"),
    ([5, 1, bytes(NAMES_MAX + 1)], "`bytes` of length <= 1024"),
    ([1, 2, "ab", [["h:1", [], ""]]], "rank 2 of 1"),
    ([1, 0, "ab", [["h", [], ""]]], "write host:port"),
    ([1, 0, "ab", [["h:1", [], "h:2"]]], "'h:2' is not a transfer engine; use tcp:// or rdma://"),
    ([8, 1, b"\2", [-1]], "Expected `int` >= 0 - at `$[3][0]`"),
    ([1, 0, "ab", [["h:1", [["kv", "s"]] * 65, ""]]], "of length <= 64"),
    ([1, 0, "ab", ["h:1"] * (RANKS_MAX + 1)], "of length <= 1024"),
]
"""Inputs that are no valid message, and the error for each."""


@pytest.mark.parametrize("message", MESSAGES_SENT, ids=lambda each: type(each).__name__)
def test_a_frame_says_how_long_its_parts_are(message: Message) -> None:
    raw = memoryview(encode(message, attached_bytes=1 << 40))

    assert decode_prefix(raw[:PREFIX_BYTES]) == (len(raw) - PREFIX_BYTES, 1 << 40)
    assert MESSAGES.decode(raw[PREFIX_BYTES:]) == message


def test_the_bytes_are_those_of_this_version() -> None:
    """The encoded bytes are fixed: a change of the wire format requires a new `VERSION`."""
    assert MESSAGES.encode(MESSAGES_SENT[1]) == msgspec.msgpack.encode(
        [2, 1, "kv", "l0-4.h0-2", ["00" * 32, "11" * 32]]
    )
    assert RANKS.decode(RANKS.encode(RANK)) == RANK
    assert RANKS.encode(RANK) == msgspec.msgpack.encode([RANK.address, RANK.shards, ""])


@pytest.mark.parametrize("control_bytes", [0, CONTROL_BYTES_MAX + 1, (1 << 32) - 1])
def test_a_message_of_an_impossible_length_is_refused_before_it_is_received(
    control_bytes: int,
) -> None:
    prefix = control_bytes.to_bytes(4, "little") + bytes(8)

    with pytest.raises(StorageError, match=f"a message of {control_bytes} bytes"):
        decode_prefix(memoryview(prefix))


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_does_not_fit_the_schema_is_refused_by_what_is_wrong(
    fields: Any, message: str
) -> None:
    with pytest.raises(StorageError) as refused:
        MESSAGES.decode(msgspec.msgpack.encode(fields))

    assert message in str(refused.value)


def test_a_message_that_is_too_long_is_not_written() -> None:
    names = tuple(["k" * 1000] * NAMES_MAX)

    with pytest.raises(StorageError, match=f"at most {CONTROL_BYTES_MAX}"):
        encode(LookupRequest(1, "kv", "s", names))
