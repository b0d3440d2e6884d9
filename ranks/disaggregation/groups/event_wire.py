"""KV events as bytes: in vLLM's own format, which routers read, and snapshots in one of ours.

vLLM sends three frames over ZeroMQ: a topic, the batch's number in eight bytes, the most significant
first, and the batch in msgpack: a list of its time, its events and the data-parallel rank, where an
event is a map with its name under `type` and without what has its default. Whoever missed some sends
the number to begin from, and gets the same frames again. There is no life in it: that comes from
where the group is listed.

Bytes that make no sense are None here, and so count as lost: the gap shows with the next batch.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import msgpack
import numpy as np

from ...replica.notices import Tier
from ...replica.tree.page_keys import KEY_BYTES
from .kv_events import (
    NOTHING_YET,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Snapshot,
)

MEDIA: Final = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
"""The tiers by the names that vLLM gives them."""
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
"""The number that ends what is sent again."""

_TIERS: Final = {name: tier for tier, name in MEDIA.items()}
_SNAPSHOT: Final = "lockstep-kv-snapshot"
_VERSION: Final = 1


def to_frames(
    batch: EventBatch, *, page_tokens: int, topic: str = "", data_parallel_rank: int = 0
) -> tuple[bytes, bytes, bytes]:
    """Return a batch as the frames that vLLM's publisher would send."""
    events = [_event_map(event, page_tokens) for event in batch.events]
    payload: bytes = msgpack.packb([batch.time_s, events, data_parallel_rank])
    return topic.encode(), batch.sequence.to_bytes(8, "big"), payload


def from_frames(frames: Sequence[bytes], *, life: int) -> EventBatch | None:
    """Return the batch that such frames hold; None if they make no sense."""
    if len(frames) != 3 or len(frames[1]) != 8 or frames[1] == END_OF_REPLAY:
        return None
    parts = _list(_unpacked(frames[2]))
    time_s, rows = parts[:2] if len(parts) > 1 else (None, None)
    if not isinstance(time_s, int | float) or not math.isfinite(time_s):
        return None
    events = [_event(row) for row in _list(rows, [None])]
    known = tuple(each for each in events if each is not None)
    if len(known) < len(events):
        return None
    sequence = int.from_bytes(frames[1], "big")
    return EventBatch(life=life, sequence=sequence, time_s=float(time_s), events=known)


def snapshot_to_bytes(snapshot: Snapshot) -> bytes:
    """Return a snapshot as msgpack."""
    held = {MEDIA[tier]: b"".join(keys) for tier, keys in snapshot.held.items()}
    record = [_SNAPSHOT, _VERSION, snapshot.life, snapshot.sequence, held]
    return msgpack.packb(record)


def snapshot_from_bytes(data: bytes) -> Snapshot | None:
    """Return the snapshot that bytes hold; None if they make no sense, or are of another version."""
    parts = _list(_unpacked(data))
    if len(parts) != 5 or parts[:2] != [_SNAPSHOT, _VERSION]:
        return None
    life, sequence, held = parts[2:]
    if not isinstance(life, int) or not isinstance(sequence, int) or not isinstance(held, dict):
        return None
    if life < 0 or sequence < NOTHING_YET:
        return None
    by_tier: dict[Tier, tuple[bytes, ...]] = dict.fromkeys(MEDIA, ())
    for medium, keys in cast("dict[object, object]", held).items():
        if not isinstance(medium, str) or medium not in _TIERS:
            return None
        if not isinstance(keys, bytes) or len(keys) % KEY_BYTES:
            return None
        by_tier[_TIERS[medium]] = tuple(_cut(keys))
    return Snapshot(life=life, sequence=sequence, held=by_tier)


def _event_map(event: Event, page_tokens: int) -> dict[str, Any]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlockRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": list(event.keys),
            "medium": MEDIA[event.tier],
        }
    return {
        "type": "BlockStored",
        "block_hashes": list(event.keys),
        "parent_block_hash": event.after,
        "token_ids": np.frombuffer(event.tokens, np.dtype("<i4")).tolist(),
        "block_size": page_tokens,
        "lora_id": None,
        "medium": MEDIA[event.tier],
        "lora_name": None,
    }


def _event(row: object) -> Event | None:
    """Return an event; of others' `BlockStored` the tokens are left out, which nobody here needs."""
    if not isinstance(row, dict):
        return None
    fields = cast("dict[object, object]", row)
    kind, medium = fields.get("type"), fields.get("medium")
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind not in ("BlockStored", "BlockRemoved") or not isinstance(medium, str):
        return None
    hashes = _list(fields.get("block_hashes"), [None])
    keys = tuple(each for each in hashes if isinstance(each, bytes))
    if medium not in _TIERS or len(keys) < len(hashes):
        return None
    if kind == "BlockRemoved":
        return BlockRemoved(_TIERS[medium], keys)
    after = fields.get("parent_block_hash")
    return BlockStored(_TIERS[medium], keys, after if isinstance(after, bytes) else None)


def _list(value: object, otherwise: Sequence[object] = ()) -> list[object]:
    """Return a list as it is, and something else for what is none."""
    return cast("list[object]", value) if isinstance(value, list) else [*otherwise]


def _unpacked(data: bytes) -> object:
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, RecursionError):
        return None


def _cut(keys: bytes) -> Iterator[bytes]:
    for at in range(0, len(keys), KEY_BYTES):
        yield keys[at : at + KEY_BYTES]
