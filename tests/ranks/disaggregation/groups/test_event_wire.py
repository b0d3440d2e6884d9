"""Events as bytes: what vLLM's publisher sends, byte for byte, and nothing that makes no sense."""

import msgpack
import pytest

from lockstep.ranks.disaggregation.groups.event_wire import (
    END_OF_REPLAY,
    from_frames,
    snapshot_from_bytes,
    snapshot_to_bytes,
    to_frames,
)
from lockstep.ranks.disaggregation.groups.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Snapshot,
)
from lockstep.ranks.replica.notices import Tier

A, B, C = (bytes([letter]) * 32 for letter in b"ABC")
BATCH = EventBatch(
    life=5,
    sequence=260,
    time_s=1.5,
    events=(
        AllBlocksCleared(),
        BlockStored(Tier.DEVICE, (A, B), None, b"\1\0\0\0\2\0\0\0"),
        BlockStored(Tier.HOST, (C,), B),
        BlockRemoved(Tier.HOST, (C,)),
    ),
)
SNAPSHOT = Snapshot(life=5, sequence=260, held={Tier.DEVICE: (A, B), Tier.HOST: (C,)})
NUMBER = (0).to_bytes(8, "big")


def payload(*parts: object) -> tuple[bytes, bytes, bytes]:
    packed: bytes = msgpack.packb(list(parts))
    return b"", NUMBER, packed


def test_a_batch_is_written_as_vllm_writes_it() -> None:
    topic, number, data = to_frames(BATCH, page_tokens=1, topic="kv@p0", data_parallel_rank=3)

    assert topic == b"kv@p0"
    assert number == b"\0\0\0\0\0\0\1\4"
    assert msgpack.unpackb(data) == [
        1.5,
        [
            {"type": "AllBlocksCleared"},
            {
                "type": "BlockStored",
                "block_hashes": [A, B],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {
                "type": "BlockStored",
                "block_hashes": [C],
                "parent_block_hash": B,
                "token_ids": [],
                "block_size": 1,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [C], "medium": "CPU"},
        ],
        3,
    ]


def test_a_batch_is_read_back_but_for_its_tokens() -> None:
    read = from_frames(to_frames(BATCH, page_tokens=1), life=5)

    assert read is not None
    assert (read.life, read.sequence, read.time_s) == (5, 260, 1.5)
    assert [type(each) for each in read.events] == [type(each) for each in BATCH.events]
    assert read.events[1] == BlockStored(Tier.DEVICE, (A, B), None)
    assert read.events[2:] == BATCH.events[2:]


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (b"", NUMBER),
        (b"", b"short", b"\x90"),
        (b"", END_OF_REPLAY, b""),
        (b"", NUMBER, b"\xc1"),
        (b"", NUMBER, b""),
        payload(),
        payload("time", []),
        payload(float("nan"), []),
        payload(0.0, {}),
        payload(0.0, [None]),
        payload(0.0, [{"type": "BlockMoved"}]),
        payload(0.0, [{"type": "BlockStored", "block_hashes": [1], "medium": "GPU"}]),
        payload(0.0, [{"type": "BlockStored", "block_hashes": [A], "medium": "DISK"}]),
        payload(0.0, [{"type": "BlockRemoved", "block_hashes": None, "medium": "GPU"}]),
    ],
)
def test_frames_that_make_no_sense_are_lost(frames: tuple[bytes, ...]) -> None:
    assert from_frames(frames, life=0) is None


def test_a_snapshot_is_read_back_as_it_was() -> None:
    assert snapshot_from_bytes(snapshot_to_bytes(SNAPSHOT)) == SNAPSHOT


@pytest.mark.parametrize(
    "record",
    [
        [],
        ["other", 1, 0, 0, {}],
        ["lockstep-kv-snapshot", 2, 0, 0, {}],
        ["lockstep-kv-snapshot", 1, -1, 0, {}],
        ["lockstep-kv-snapshot", 1, 0, -2, {}],
        ["lockstep-kv-snapshot", 1, 0, 0, {"TAPE": A}],
        ["lockstep-kv-snapshot", 1, 0, 0, {"GPU": A[:-1]}],
        ["lockstep-kv-snapshot", 1, 0, 0, {"GPU": 7}],
    ],
)
def test_a_snapshot_that_makes_no_sense_is_none(record: list[object]) -> None:
    packed: bytes = msgpack.packb(record)

    assert snapshot_from_bytes(packed) is None
    assert snapshot_from_bytes(packed[:-1]) is None
