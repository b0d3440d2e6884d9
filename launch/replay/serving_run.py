"""A rank's counters, and their transfer to rank 0 if the replay is interrupted.

An interrupted rank leaves at once, possibly in the middle of a round, so no collective can gather
results. Instead, each rank first writes its counters to torch's rendezvous store. If a rank loses a
peer, it checks this store to see whether the peer was interrupted or has failed.
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
    """One replay on a rank: serves all requests and counts the results."""

    def __init__(
        self,
        cache: "Cache",
        scheduler: Scheduler,
        sampler: Sampler | None = None,
        events: KeptEvents | None = None,
    ) -> None:
        """Create the run; if `sampler` or `events` is None, no samples or events are kept."""
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._events = events
        if sampler is not None:
            sampler.begin(scheduler)
        self._began = time.perf_counter()

    def until_done(self) -> RankResult:
        """Serve all requests and flush the writes; raise `Interrupted` if the scheduler was stopped."""
        if not self._scheduler.run():
            raise Interrupted
        served = time.perf_counter()
        self._cache.flush()
        flush_s = time.perf_counter() - served
        try:
            # All requests and operations have ended, so a page that still belongs to a request or an
            # operation has leaked.
            self._cache.inspection.check()
        except InvariantViolation as broken:
            return self.so_far(flush_s, str(broken))
        return self.so_far(flush_s)

    def so_far(self, flush_s: float = 0.0, violation: str = "") -> RankResult:
        """Return the counters so far, while requests and operations may still be in flight."""
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
    """Write a rank's result to the rendezvous store, which marks the replay as interrupted.

    Do nothing if the store no longer answers.
    """
    with suppress(RuntimeError):
        _put(store, _of_rank(rank), msgspec.msgpack.encode(result))
        store.add(_BEGUN, 1)


def was_begun(store: Store) -> bool:
    """Return whether a rank has called `submit_requests`; if so, a lost peer is not a failure."""
    try:
        return store.add(_BEGUN, 0) > 0
    except RuntimeError:
        return False


def collect(store: Store, own: RankResult, ranks: int) -> list[RankResult]:
    """Return the result of rank 0 (`own`), and the other ranks' results that arrive in time."""
    results = [own]
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    for rank in range(1, ranks):
        with suppress(RuntimeError):
            # Poll the rendezvous store, because its own wait function prints a warning at a timeout.
            while not (come := store.check([_of_rank(rank)])) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if come:
                packed = _take(store, _of_rank(rank))
                results.append(msgspec.msgpack.decode(packed, type=RankResult))
    return results


def _put(store: Store, key: str, data: bytes) -> None:
    """Write data of any length under `key`; the key exists only after all pieces are written.

    The data is split into pieces, because a value in torch's rendezvous store can have only a few MB.
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
