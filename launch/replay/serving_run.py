"""A rank's counters, and their transfer to rank 0 if the run is interrupted.

An interrupted rank leaves at once, possibly in the middle of a round, so no collective can gather
results. Each rank first writes its counters to the rendezvous store. A rank that loses a peer reads
there that the peer was interrupted.
"""

import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec
from torch.distributed.distributed_c10d import Store

from ...ranks.replica.check import InvariantViolation
from ...small_engine.scheduler import Scheduler
from ...telemetry.kept_events import KeptEvents
from ..cli.interruption import Interrupted
from .report import RankResult
from .samples import Sampler

if TYPE_CHECKING:
    from ...ranks.group.cache import Cache

COLLECT_TIMEOUT_S = 1.0
"""Seconds that rank 0 waits for the results of the other ranks."""
_POLL_S = 0.01
_PIECE_BYTES = 1 << 20
_BEGUN = "interrupted"


class ServingRun:
    """One run: serves all requests and counts the results."""

    def __init__(
        self,
        cache: "Cache",
        scheduler: Scheduler,
        sampler: Sampler | None = None,
        events: KeptEvents | None = None,
    ) -> None:
        """`sampler` is given on rank 0 and starts here; `events` is given if the rank keeps events."""
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._events = events
        if sampler is not None:
            sampler.begin(scheduler)
        self._began = time.perf_counter()

    def until_done(self) -> RankResult:
        """Serve all requests and flush the writes. Raises `Interrupted` if the scheduler is stopped."""
        if not self._scheduler.run():
            raise Interrupted
        served = time.perf_counter()
        self._cache.flush()
        flush_s = time.perf_counter() - served
        try:
            # No request or operation is left to own a page, so the check finds leaked pages.
            self._cache.inspection.check()
        except InvariantViolation as broken:
            return self.so_far(flush_s, str(broken))
        return self.so_far(flush_s)

    def so_far(self, flush_s: float = 0.0, violation: str = "") -> RankResult:
        """Return the counters so far. Requests and operations may be in flight."""
        stats = self._cache.stats()
        return RankResult(
            counts=self._scheduler.counts,
            refusals=self._scheduler.refusals,
            steps=stats.steps,
            rounds=stats.rounds,
            transport=stats.transport,
            collectives=stats.collectives,
            round_us=stats.round_us,
            operations=stats.operations,
            bytes_moved=asdict(stats.bytes_moved),
            operations_left=len(self._cache.inspection.in_flight),
            violation=violation,
            storage_corrupt=stats.pages_corrupt,
            storage_late_calls=stats.storage_late.calls,
            storage_waited_s=stats.storage_late.waited_s,
            digest=stats.digest,
            wall_s=time.perf_counter() - self._began,
            flush_s=flush_s,
            samples=None if self._sampler is None else self._sampler.samples(),
            timeline=None
            if self._events is None
            else self._events.of_rank(self._cache.rank).pack(),
        )


def submit_requests(store: Store, rank: int, result: RankResult) -> None:
    """Write a rank's result to the store, unless the store ended with the launcher."""
    with suppress(RuntimeError):
        _put(store, _of_rank(rank), msgspec.msgpack.encode(result))
        store.add(_BEGUN, 1)


def was_begun(store: Store) -> bool:
    """Return whether an interrupted rank has written its result; then a lost peer is not a failure."""
    try:
        return store.add(_BEGUN, 0) > 0
    except RuntimeError:
        return False


def collect(store: Store, own: RankResult, ranks: int) -> list[RankResult]:
    """Return the results: `own` of rank 0, and those that other ranks write in time."""
    results = [own]
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    for rank in range(1, ranks):
        with suppress(RuntimeError):
            # Poll, because a wait of the store prints a warning when it times out.
            while not (come := store.check([_of_rank(rank)])) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if come:
                packed = _take(store, _of_rank(rank))
                results.append(msgspec.msgpack.decode(packed, type=RankResult))
    return results


def _put(store: Store, key: str, data: bytes) -> None:
    """Write data of any length under a key; the key exists once all of the data is written.

    The data is split, because a store takes values of a few MB at most.
    """
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece.hex())
    store.set(key, str(len(pieces)))


def _take(store: Store, key: str) -> bytes:
    """Return the data that `_put` wrote under an existing key."""
    pieces = range(int(store.get(key)))
    return b"".join(bytes.fromhex(store.get(f"{key}/{number}").decode()) for number in pieces)


def _of_rank(rank: int) -> str:
    return f"{_BEGUN}/{rank}"
