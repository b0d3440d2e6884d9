"""KV events as vLLM has them: it reads what a group sends, and would have sent the same."""

import pytest

from lockstep.ranks.disaggregation.groups.event_wire import from_frames, to_frames
from lockstep.ranks.disaggregation.groups.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from lockstep.ranks.replica.notices import Tier

pytestmark = pytest.mark.engines

A, B = b"A" * 32, b"B" * 32
BATCH = EventBatch(
    life=5,
    sequence=260,
    time_s=1.5,
    events=(
        AllBlocksCleared(),
        BlockStored(Tier.DEVICE, (A, B), None, b"\1\0\0\0\2\0\0\0"),
        BlockStored(Tier.HOST, (B,), A),
        BlockRemoved(Tier.HOST, (B,)),
    ),
)


def test_vllm_reads_the_events_and_would_have_written_the_same() -> None:
    """But for the head of a map, which may be longer than it has to be: 0.33 has a sixteenth field."""
    msgspec = pytest.importorskip("msgspec", reason="needs vLLM")
    theirs = pytest.importorskip("vllm.distributed.kv_events", reason="needs vLLM")
    topic, number, data = to_frames(BATCH, page_tokens=1)

    read = msgspec.msgpack.decode(data, type=theirs.KVEventBatch)

    assert [type(each).__name__ for each in read.events] == [
        *("AllBlocksCleared", "BlockStored", "BlockStored", "BlockRemoved")
    ]
    assert (read.ts, read.data_parallel_rank) == (1.5, 0)
    assert (read.events[1].block_hashes, read.events[1].token_ids) == ([A, B], [1, 2])
    assert (read.events[2].parent_block_hash, read.events[2].medium) == (A, theirs.MEDIUM_CPU)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(read)) == msgspec.msgpack.decode(data)
    assert from_frames((topic, number, msgspec.msgpack.encode(read)), life=5) is not None
