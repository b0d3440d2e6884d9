"""What a group hands in when it has served: left by rank 0 where its ranks met."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import cast

import msgpack
from torch.distributed.distributed_c10d import Store

from ..handing_in import put, take
from ..report import Report

_KEY = "served"
_TIMELINES = "timelines"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What one group has counted."""

    report: Report
    handoffs: Mapping[str, int]
    """How requests came, by `Outcome`; nothing for a group that prefills."""
    manifests_refused: Mapping[str, int]
    departures: Mapping[str, int]
    """How requests left: received, expired, withdrawn; nothing for a group that decodes."""

    def pack(self) -> bytes:
        """Return the result as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "GroupResult":
        """Return the result that `pack` wrote."""
        return cls(**cast("dict[str, object]", json.loads(data)))  # type: ignore[arg-type]


def hand_in(store: Store, result: GroupResult, timelines: Sequence[bytes]) -> None:
    """Leave the result of this group, and the events of its ranks, for whoever hosts the store."""
    put(store, _TIMELINES, msgpack.packb(list(timelines)))
    store.set(_KEY, result.pack().decode())


def collect(store: Store, timeout_s: float) -> GroupResult | None:
    """Return the result of a group; None if it has left none in time."""
    deadline = time.monotonic() + timeout_s
    with suppress(RuntimeError):
        # A wait of the store's own would print a warning when it is in vain.
        while not (come := store.check([_KEY])) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if come:
            return GroupResult.unpack(store.get(_KEY))
    return None


def collect_timelines(store: Store) -> list[bytes]:
    """Return the events of the ranks of a group whose result is there, as each has packed them."""
    with suppress(RuntimeError):
        if store.check([_TIMELINES]):
            return cast("list[bytes]", msgpack.unpackb(take(store, _TIMELINES)))
    return []
