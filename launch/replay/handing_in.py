"""What a rank has counted, and how it is handed in where the ranks met if the run is interrupted.

A rank that is interrupted leaves at once, in the midst of rounds, so that no collective can gather
anything. Each rank puts what it has counted into the store in which the ranks met, and only then
leaves: whoever loses a peer can see there that the peer was interrupted.
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
"""How long rank 0 waits for the others, which were interrupted with it or see that it has left."""
_POLL_S = 0.01
_PIECE_BYTES = 1 << 20
_BEGUN = "interrupted"


class Run:
    """The serving of all requests, and what was counted of it."""

    def __init__(
        self,
        cache: "Cache",
        scheduler: Scheduler,
        sampler: Sampler | None = None,
        events: KeptEvents | None = None,
    ) -> None:
        """`sampler` is rank 0's, which begins here; `events` are the rank's, where it keeps them."""
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._events = events
        if sampler is not None:
            sampler.begin(scheduler)
        self._began = time.perf_counter()

    def to_its_end(self) -> RankResult:
        """Serve all requests and write what is to be written. Raises `Interrupted` if it is stopped."""
        if not self._scheduler.run():
            raise Interrupted
        served = time.perf_counter()
        self._cache.flush()
        flush_s = time.perf_counter() - served
        try:
            # No request and no operation is left that could own a page, so one that leaked shows here.
            self._cache.inspection.check()
        except InvariantViolation as broken:
            return self.so_far(flush_s, str(broken))
        return self.so_far(flush_s)

    def so_far(self, flush_s: float = 0.0, violation: str = "") -> RankResult:
        """Return what was counted. Requests and operations may be in flight."""
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


def hand_in(store: Store, rank: int, result: RankResult) -> None:
    """Leave the result of `rank` for rank 0, unless the store ended with the launcher."""
    with suppress(RuntimeError):
        _put(store, _of_rank(rank), msgspec.msgpack.encode(result))
        store.add(_BEGUN, 1)


def was_begun(store: Store) -> bool:
    """Say whether a rank has handed in, so that who misses it does not take it for dead."""
    try:
        return store.add(_BEGUN, 0) > 0
    except RuntimeError:
        return False


def collect(store: Store, own: RankResult, ranks: int) -> list[RankResult]:
    """Return the results of rank 0, which is `own`, and of those others that hand in in time."""
    results = [own]
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    for rank in range(1, ranks):
        with suppress(RuntimeError):
            # A wait of the store's own would print a warning when it is in vain.
            while not (come := store.check([_of_rank(rank)])) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if come:
                packed = _take(store, _of_rank(rank))
                results.append(msgspec.msgpack.decode(packed, type=RankResult))
    return results


def _put(store: Store, key: str, data: bytes) -> None:
    """Leave data of any length under a key, which is there only once all of it is.

    A store takes values of a few MB at most.
    """
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece.hex())
    store.set(key, str(len(pieces)))


def _take(store: Store, key: str) -> bytes:
    """Return what `_put` has left under a key that is there."""
    pieces = range(int(store.get(key)))
    return b"".join(bytes.fromhex(store.get(f"{key}/{number}").decode()) for number in pieces)


def _of_rank(rank: int) -> str:
    return f"{_BEGUN}/{rank}"
