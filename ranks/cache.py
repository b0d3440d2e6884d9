"""The engine's side: one cache for an engine that runs the same scheduler on every rank.

Every rank makes the same calls in the same order with the same arguments, and gets the same answers.
Once per engine step, whatever is in flight, it calls `step`, which is the only place where ranks
communicate. Local facts (how fast a disk is, what a store has lost) never show in an answer before
all ranks have agreed on them.

    admission:  match -> prefetch -> step ... until prefetch_done -> load_back -> step ... until READY
    compute:    write KV into page_table's pages, insert(final=False) after each chunk
    finish:     insert(final=True), release

The last token of a prompt has to be computed in any case, so an engine gives `tokens[:-1]` to match,
prefetch and load_back.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..coordinator.ballot import Ballot
from ..coordinator.collectives.base import Collective
from ..coordinator.round import Rounds
from ..errors import GroupError, UsageError
from .config import CacheConfig
from .executor.base import BytesMoved, Executor
from .replica.replica import Replica
from .replica.serving import Admission, LoadState, Match, Wait
from .replica.state import ReplicaConfig
from .replica.tokens import Tokens, as_token_bytes

if TYPE_CHECKING:
    import torch

    from .executor.pools import DevicePool

FLUSH_POLL_S = 0.005
"""How long an idle flush waits for local progress before it votes again."""

ROUND_TIMES_KEPT = 1 << 17
"""How many of the last steps are remembered with their time."""

log = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What one rank's cache has done since it was opened."""

    steps: int
    rounds: int
    collectives: int
    """Launched by the transport for rounds; equal to `steps`."""
    round_us: list[float]
    """For each of the last steps, how long it kept the engine, without the idle wait it asked for."""
    operations: dict[str, dict[str, int]]
    """How many operations of each kind ended in each way."""
    bytes_moved: BytesMoved
    pages_corrupt: int
    """Pages whose bytes in storage were wrong; each was a miss."""
    digest: int
    """Of the replicated state; equal on all ranks."""


class Cache:
    """One rank's cache. Not thread-safe: all calls come from the engine's scheduler thread."""

    def __init__(
        self,
        config: CacheConfig,
        collective: Collective,
        executor: Executor,
        replica_config: ReplicaConfig,
        *,
        device_pool: "DevicePool | None" = None,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        """Put a cache together from its parts; `open` makes them from a configuration."""
        self.config = config
        self._device_pool = device_pool
        self.executor = executor
        self.ballot = Ballot()
        self.replica = Replica(replica_config, self.ballot)
        self.rounds = Rounds(
            collective,
            slots=config.bounds.prefetches,
            timeout_s=config.timeouts.round_s,
            recorder=self.replica.state.journal.recorder,
        )
        self._collective = collective
        self._clock_ms = clock_ms or _steady_clock_ms()
        self._steps = 0
        self._round_s: deque[float] = deque(maxlen=ROUND_TIMES_KEPT)
        self._closed = False

    @classmethod
    def open(
        cls,
        config: CacheConfig,
        collective: Collective | None = None,
        *,
        device: "torch.device | str" = "cpu",
    ) -> "Cache":
        """Make this rank's cache: compare settings over the ranks, get memory, open the store.

        Collective: every rank calls it at the same point. `collective` is the transport for rounds,
        the cache's from now on; by default a new gloo group of all ranks of `torch.distributed`,
        which must be initialised. Raises the same `ConfigError` on every rank if settings differ or
        one rank cannot start.
        """
        # Simulation and the replica's tests need no torch, which takes seconds to import.
        import torch  # noqa: PLC0415

        from ..coordinator.collectives.torch_gloo import TorchCollective  # noqa: PLC0415
        from .opening import open_cache  # noqa: PLC0415

        if collective is None:
            # Gloo's own bound must not end what the start is still allowed to wait for.
            longest_s = max(config.timeouts.round_s, config.timeouts.open_s)
            collective = TorchCollective.create(timeout_s=longest_s)
        return open_cache(config, collective, torch.device(device))

    @property
    def device_pool(self) -> "DevicePool":
        """The device pages; `.column(name)` is a tensor [layers, pages, heads, tokens, elements]."""
        if self._device_pool is None:
            raise UsageError("this cache has no device pages of its own")
        return self._device_pool

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._collective.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share every page."""
        return self._collective.world_size

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """Return how much of `tokens` is cached on device and host. Changes nothing."""
        return self.replica.match(namespace, as_token_bytes(tokens))

    def prefetch(self, request: str, tokens: Tokens, namespace: str = "") -> bool:
        """Begin to bring from storage what follows the cached part of `tokens`.

        Returns False if there is nothing to bring, no store, or no more room to wait. The request is
        known from here on; `release` or `abort` forgets it. Nothing is held on the device.
        """
        self._require_group()
        _require_text(namespace)
        started = self.replica.prefetch(request, namespace, as_token_bytes(tokens))
        self._dispatch()
        return started

    def prefetch_done(self, request: str) -> bool:
        """Say whether the stop policy lets the engine schedule the request now.

        True if it has no prefetch, its prefetch has ended, or the policy is `best_effort`.
        """
        return self.replica.prefetch_done(request)

    def load_back(
        self, request: str, tokens: Tokens, namespace: str = "", *, reserve_tokens: int = 0
    ) -> Admission | Wait:
        """Admit a request: lock its device prefix, load back what the host has, reserve the rest.

        `tokens` are those that may be taken from the cache; `reserve_tokens` is the number of tokens
        in total that the request needs device pages for. All of it happens, or nothing does and a
        `Wait` says why. A prefetch of the request ends with what has landed by the last verdict.
        The pages may be used once `load_state` is READY.
        """
        self._require_group()
        _require_text(namespace)
        data, reserve = as_token_bytes(tokens), _count(reserve_tokens)
        admission = self.replica.load_back(request, namespace, data, reserve)
        self._dispatch()
        return admission

    def load_state(self, request: str) -> LoadState:
        """Say whether an admitted request's prefix is on the device on every rank."""
        return self.replica.load_state(request)

    def page_table(self, request: str) -> npt.NDArray[np.int32]:
        """Return the device pages of a READY request in token order: shared prefix, then its own.

        A copy. `insert` may change the table, since a page that the tree has already replaces the
        request's own.
        """
        return np.array(self.replica.page_table(request), dtype=np.int32)

    def extend(self, request: str, total_tokens: int) -> bool:
        """Reserve device pages for `total_tokens` tokens in total; False if there is no room."""
        self._require_group()
        done = self.replica.extend(request, _count(total_tokens))
        self._dispatch()
        return done

    def insert(self, request: str, tokens: Tokens, *, final: bool = True) -> int:
        """Publish the whole pages of `tokens`, whose KV is in the request's pages.

        Call it only when the KV has been written, or is ordered before every later use on the
        engine's stream. `final=False` says that the prompt goes on (chunked prefill). The published
        pages are shared, backed up under the write policy, and stay locked for the request. Returns
        the number of tokens that the tree now shares with it.
        """
        self._require_group()
        shared = self.replica.insert(request, as_token_bytes(tokens), final=final)
        self._dispatch()
        return shared

    def release(self, request: str) -> None:
        """Forget a request: unlock what it shares and give back what is its own."""
        self.replica.release(request)
        self._dispatch()

    def abort(self, request: str) -> None:
        """Forget a request wherever it stands, also one that is not known.

        What its prefetch has landed stays cached; what is still moving settles by itself.
        """
        if request in self.replica.state.requests:
            self.release(request)

    def step(self, *, idle_s: float = 0.0) -> None:
        """Run one round; call it once in every engine step, also when nothing is in flight.

        `idle_s` lets an engine that has nothing to compute wait up to so long for local progress
        before it votes. Raises `GroupError` when the epoch has ended; every later call raises it too.
        """
        if idle_s and not self.replica.idle:
            self.executor.wait(idle_s)
        started = time.perf_counter()
        if self.config.pipeline_depth:
            self.close_round()
            self.open_round()
        else:
            self.open_round()
            self.close_round()
        self._round_s.append(time.perf_counter() - started)

    def open_round(self) -> None:
        """Vote: the half of a step that launches its round. For drivers that turn ranks by hand."""
        for progress in self.executor.progress():
            self.ballot.note(progress)
        trouble = self.executor.trouble()
        if trouble is not None:
            log.error("rank %d cannot go on: %s", self.rank, trouble)
        self.rounds.open(
            self.replica.slots(),
            self.replica.digest,
            self.ballot,
            healthy=trouble is None,
            time_ms=self._clock_ms(),
        )
        self._steps += 1

    def close_round(self) -> None:
        """Apply the verdict of the pending round, if there is one."""
        if self.rounds.pending or self.rounds.ended_by is not None:
            self.replica.apply(self.rounds.close())
            self._dispatch()

    def flush(self) -> bool:
        """Run rounds until nothing is in flight: what was inserted is backed up and persisted.

        What failed, or found no room, is not tried again; `stats().operations` counts it.
        Returns False if that took longer than `timeouts.flush_s` in agreed time, on every rank alike.
        """
        self.step()
        began_ms = self.replica.state.time_ms
        while not self.replica.idle:
            self.step(idle_s=FLUSH_POLL_S)
            now_ms = self.replica.state.time_ms
            began_ms = began_ms or now_ms
            if now_ms - began_ms > self.config.timeouts.flush_s * 1000:
                return False
        return True

    def close(self, *, flush: bool = True) -> None:
        """Flush, then stop I/O and leave the group. Safe after errors; may be called twice.

        `flush=False` drops what is in flight; every rank must then do the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if flush and self.rounds.ended_by is None:
                self.flush()
            if self.rounds.pending:
                self.close_round()
        except GroupError as error:
            log.warning("rank %d closes without its group: %s", self.rank, error)
        finally:
            self.executor.close()
            self._collective.close()

    def stats(self) -> CacheStats:
        """Return what this rank has done so far."""
        operations: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.replica.state.operations.outcomes.items()):
            operations.setdefault(kind.name.lower(), {})[outcome.name.lower()] = count
        return CacheStats(
            steps=self._steps,
            rounds=self.rounds.count,
            collectives=self._collective.launches,
            round_us=[seconds * 1e6 for seconds in self._round_s],
            operations=operations,
            bytes_moved=self.executor.bytes_moved(),
            pages_corrupt=self.executor.pages_corrupt(),
            digest=self.replica.digest,
        )

    def _require_group(self) -> None:
        if self.rounds.ended_by is not None:
            raise self.rounds.ended_by

    def _dispatch(self) -> None:
        orders = self.replica.take_orders()
        if orders:
            self.executor.carry_out(orders)
        for notice in self.replica.take_notices():
            log.info(
                "prefetch %d of request %s: rank %s lacks page %d (key %s): %s",
                notice.operation,
                notice.request,
                notice.rank,
                notice.page,
                notice.key.hex()[:16],
                notice.reason,
            )


def _steady_clock_ms() -> Callable[[], int]:
    """Return the wall clock as of now, going on steadily: a deadline must not wait for a clock."""
    base_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (base_ns + time.monotonic_ns()) // 1_000_000


def _require_text(namespace: str) -> None:
    try:
        namespace.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise UsageError(f"a namespace must be text that UTF-8 can hold: {error}") from error


def _count(tokens: int) -> int:
    try:
        return index(tokens)
    except TypeError as error:
        raise UsageError(f"a number of tokens must be an integer: {error}") from error
