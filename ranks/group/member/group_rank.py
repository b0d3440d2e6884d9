"""One rank of a group: its rounds, the execution of their effects, and closing."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ....coordinator.collective import Collective
from ....coordinator.collectives.home_process import HomeProcess
from ....coordinator.lanes import BallotShape
from ....coordinator.operation import Phase
from ....coordinator.round import Rounds
from ....coordinator.verdict import Verdict
from ....errors import GroupError, InternalError, RankUnhealthy, UsageError
from ....storage_backends.latencies import Latencies
from ...executor.base import Executor
from ...protocol.config import RankCacheConfig
from ...protocol.effects import NOTHING, Effects
from ...protocol.events import Event
from ...protocol.replica_config import ReplicaConfig
from ...protocol.timed_events import RoundHeld, StepHalf, Timeline
from ...replica.attaching import StoreState
from ...replica.parts import SOUND, Parts
from ...replica.replica import Replica
from ...replica.tree.backlog import Undone
from .arguments import as_count, as_flag, as_seconds
from .ballot_header import BallotHeader
from .cache_stats import CacheStats, pools_in_use
from .inspection import Inspection
from .log_level import log_from
from .observer import Observer
from .request_log import AgreedRequests, CarryOut, RequestLog

_T = TypeVar("_T")

FLUSH_POLL_S = 0.005
"""Seconds that a flush of an idle group waits for local progress before it votes again."""

ROUND_TIMES_KEPT = 1 << 17
"""Number of most recent steps whose durations are kept."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The result of a flush, equal on every rank; true if everything is written."""

    in_time: bool
    """Whether all operations finished before the timeout."""
    unwritten: Mapping[Undone, int] = field(default_factory=dict[Undone, int])
    """Number of pages that could not be backed up or persisted, by cause."""

    def __bool__(self) -> bool:
        """Return whether everything is written."""
        return self.in_time and not self.unwritten


Listener = Callable[[Sequence[Event]], None]
"""Callback for events, called in order on the engine's thread. Must not block or change the cache."""

log = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitutes:
    """Parts that replace a rank's normal parts in simulation, tests and one-scheduler mode."""

    clock_ms: Callable[[], int] | None = None
    parts: Parts = SOUND


class GroupRank:
    """One rank of a group, driven by an engine.

    Every rank makes the same calls in the same order with the same arguments from one thread, unless a
    method says otherwise. In a forked child process, commands and rounds raise `UsageError`. `release`
    and `close` do nothing there, so a `finally` block is safe.
    """

    def __init__(
        self,
        config: RankCacheConfig,
        collective: Collective,
        executor: Executor,
        replica_config: ReplicaConfig,
        *,
        listener: Listener | None = None,
        timeline: Timeline | None = None,
        substitutes: Substitutes | None = None,
    ) -> None:
        """Create a cache from existing parts. `open` creates the parts from a configuration."""
        self.config = config
        self._executor = executor
        shape = BallotShape(
            world_size=collective.world_size, prefetch_slots=config.bounds.prefetches
        )
        using = substitutes or Substitutes()
        self._ballot = using.parts.ballot(shape, collective.rank)
        self._replica = Replica(replica_config, using.parts)
        self._rounds = Rounds(
            collective,
            shape,
            timeout_s=config.timeouts.round_s,
            recorder=self._replica.journal,
            epoch=replica_config.epoch,
        )
        self._inspection = Inspection(self._replica, self._rounds, executor)
        self._collective = collective
        self._home = HomeProcess()
        self._voting = BallotHeader(collective.rank, executor, self._ballot, using.clock_ms)
        self._staging = self._voting.staging
        self._steps = self._step = 0
        self._step_s = 0.0
        self._waited_s = 0.0
        self._round_us: deque[float] = deque(maxlen=ROUND_TIMES_KEPT)
        self._steps_took = Latencies()
        self._freed: list[str] = []
        """Names of released requests whose engine-owned device pages have become free."""
        self._requests = AgreedRequests(None)
        self._listener = listener
        self._timeline = timeline
        self._observer = Observer(collective.rank, self._replica.operation_table, timeline)
        self._voted_s = 0.0
        self._closed = False
        self._at_close: list[Callable[[], None]] = []

    @property
    def inspection(self) -> Inspection:
        """Read-only access to the cache's internals."""
        return self._inspection

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._collective.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._collective.world_size

    def store_state(self) -> StoreState:
        """Return the state of the group's store as of this rank's last step."""
        return self._replica.store_state

    def take_requests(self, log: RequestLog) -> None:
        """Take control requests from this rank's log, from the first step on."""
        self._requests = AgreedRequests(log)

    def set_control_handler(self, carry_out: CarryOut) -> None:
        """Register the function that executes control requests on this rank.

        Call on every rank before the first step. All ranks execute a control request in the same step,
        once a verdict says that every rank has received it. Its bytes enter the digest.
        """
        self._requests.handler = carry_out

    def log_from(self, level: str) -> None:
        """Set the log level in every process that works for this rank."""
        log_from(level)

    def step(self, *, idle_s: float = 0.0) -> None:
        """Run one round. Call once per engine step, even if nothing is in flight.

        For `idle_s` see `end_step`. Raises `GroupError` when the epoch has ended, and in every later
        call.
        """
        idle_s = as_seconds(idle_s, "idle_s")
        self.begin_step()
        self._end_step(idle_s)

    def begin_step(self) -> None:
        """First half of a step: apply the last verdict. For an engine that makes decisions in mid-step.

        With `pipeline_depth` 0 the call launches this step's round and waits for it. With 1 the call
        waits for the round launched by the previous step.
        """
        self._step = self._steps + 1
        started = time.monotonic()
        if not self.config.pipeline_depth:
            self.open_round()
        self.close_round()
        ended = time.monotonic()
        self._step_s = ended - started
        if self._timeline is not None:
            launches = not self.config.pipeline_depth
            self._timeline(StepHalf(self._step, launches, started, ended))

    def end_step(self, *, idle_s: float = 0.0) -> None:
        """Second half of a step: launch this step's round unless `begin_step` has launched it.

        Pass `idle_s` if no rank has anything to compute in this step. The call then waits up to
        `idle_s` for local progress, or for a control request if nothing is in flight. It also waits for
        the round, because no forward pass can overlap the round.
        """
        self._end_step(as_seconds(idle_s, "idle_s"))

    def _end_step(self, idle_s: float) -> None:
        if idle_s and not self._replica.idle:
            self._executor.wait(idle_s)
        elif idle_s:
            self._requests.wait(idle_s)
        started = time.monotonic()
        if self.config.pipeline_depth:
            self.open_round()
            if idle_s:
                self.close_round()
        ended = time.monotonic()
        took_s = self._step_s + ended - started
        if self._timeline is not None and self.config.pipeline_depth:
            self._timeline(StepHalf(self._step, True, started, ended))
        self._round_us.append(took_s * 1e6)
        self._steps_took.add(took_s)

    def open_round(self) -> None:
        """Vote and launch a round without waiting for it. For a thread that drives several ranks."""
        self._home.require_here()
        voter = self._voting.vote(self._executor.progress(), self._requests.log)
        if self._timeline is not None:
            self._voted_s = time.monotonic()
        replica = self._replica
        try:
            self._rounds.open(replica.prefetch_slots(), replica.digest, self._ballot, voter)
        except (GroupError, InternalError) as error:
            self._staging.close(error)
            raise
        self._steps += 1

    def close_round(self) -> None:
        """Wait for the pending round, if any, and apply its verdict."""
        if self._rounds.pending or self._rounds.ended_by is not None:
            try:
                verdict = self._await_verdict()
                if verdict.newest:
                    self._requests.learn(verdict.newest)
                effects = self._apply(verdict)
                if effects.lost is not None:
                    self._rounds.end(RankUnhealthy(effects.lost))
            except (GroupError, InternalError) as error:
                self._staging.close(error)
                raise
            self._follow((None, effects))

    def write_out(self) -> None:
        """Retry backups and persists that failed or found no room, without waiting for them."""
        self._require_group()
        self._follow(self._replica.write_out())

    def flush(self) -> Flushed:
        """Run rounds until nothing is in flight, so that inserted pages are backed up and persisted.

        Retries failed copies and writes once. Also persists host pages cached before the store was
        attached. The result is equal on every rank, and true if everything is written. The result is
        false if some pages could not be written, or if `timeouts.flush_s` of agreed time have passed.
        """
        self.write_out()
        self.step()
        in_time = self.step_until(lambda: self._replica.idle, self.config.timeouts.flush_s)
        return Flushed(in_time, self._replica.unwritten)

    def close(self, *, flush: bool = True) -> None:
        """Flush, stop I/O and leave the group. Safe after errors; idempotent.

        `flush=False` drops work in flight; every rank must pass the same value. Does nothing in a
        forked child process, which has none of this rank's threads.
        """
        flush = as_flag(flush, "flush")
        if self._closed or not self._home.is_here:
            return
        self._closed = True
        try:
            if flush and self._rounds.ended_by is None:
                _warn_of_unwritten(self.rank, self.flush())
            if self._rounds.pending:
                self.close_round()
        except GroupError as error:
            log.warning("rank %d closes without its group: %s", self.rank, error)
        finally:
            self._stop_serving()
            self._executor.close()
            self._collective.close()

    def abandon(self) -> None:
        """Stop I/O and leave the group without waiting for other ranks. Safe before and after `close`.

        For a rank that ends because of an error. The other ranks detect this and raise an error that
        names the rank.
        """
        if not self._closed and self._home.is_here:
            self._closed = True
            self._collective.close()
            self._stop_serving()
            self._executor.close()

    def at_close(self, then: Callable[[], None]) -> None:
        """Register a callback to run when the cache is closed or abandoned, after its last round.

        The callback must not raise. It runs before the executor is closed, because closing the executor
        may wait for a store.
        """
        self._at_close.append(then)

    def stats(self, *, rounds: int = ROUND_TIMES_KEPT) -> CacheStats:
        """Return this rank's statistics, with `round_us` of at most the last `rounds` steps.

        For any thread; never blocks the engine.
        """
        rounds = max(0, as_count(rounds, "rounds"))
        counts = self._executor.counts()
        in_flight = list(self._replica.operation_table.in_flight.values())
        kinds = Counter(each.kind.word.lower() for each in in_flight)
        prefixes, ended_by = self._replica.prefixes, self._rounds.ended_by
        return CacheStats(
            rank=self.rank,
            world_size=self.world_size,
            steps=self._steps,
            rounds=self._rounds.count,
            transport=self._collective.transport,
            collectives=self._collective.launches,
            # Copy the whole deque, because that is atomic while the engine's thread appends.
            round_us=list(self._round_us)[-rounds:] if rounds else [],
            steps_took=self._steps_took.histogram(),
            waited_s=self._waited_s,
            replica=self._observer.stats(),
            pools=pools_in_use(prefixes),
            # Convert the counters to plain dicts, because `asdict` cannot copy other mappings.
            in_flight=dict(kinds),
            quarantined=sum(each.phase is Phase.QUARANTINED for each in in_flight),
            unwritten_pages=dict[str, int](self._replica.unwritten.items()),
            left_unwritten_pages=dict[str, int](self._replica.lost_before_written.items()),
            namespaces=len(prefixes.tree.roots),
            namespaces_begun=prefixes.begun,
            bytes_moved=counts.bytes_moved,
            copies=counts.copies,
            calls=counts.calls,
            pages_corrupt=counts.pages_corrupt,
            storage_late=counts.storage_late,
            store=self.store_state(),
            stores=self._replica.store.number,
            ended_by="" if ended_by is None else type(ended_by).__name__,
            digest=self._replica.digest,
        )

    def _stop_serving(self) -> None:
        self._staging.close(UsageError("the cache is closed"))
        for each in self._at_close:
            each()

    def step_until(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Run rounds until `done` is true, or until `patience_s` of agreed time have passed.

        `done` must depend on the replica alone. Agreed time is equal on every rank. `patience_s` counts
        from the end of the first round run here, because the agreed time of an idle engine may be out
        of date before that.
        """
        began_ms = 0
        while not done():
            began_s, before = time.monotonic(), self._replica.digest
            self.step(idle_s=FLUSH_POLL_S)
            if self._replica.digest == before:
                # Sleep for the rest of `FLUSH_POLL_S`, because a step may return without waiting: while
                # only a store is being opened, or while copies have not started.
                time.sleep(max(0.0, began_s + FLUSH_POLL_S - time.monotonic()))
            now_ms = self._replica.clock.agreed_ms
            began_ms = began_ms or now_ms
            if now_ms - began_ms > patience_s * 1000:
                return done()
        return True

    def _await_verdict(self) -> Verdict:
        started = time.monotonic()
        pending = self._rounds.pending
        try:
            return self._rounds.close()
        finally:
            ended = time.monotonic()
            self._waited_s += ended - started
            if self._timeline is not None and pending:
                number = self._rounds.count
                self._timeline(RoundHeld(number, self._voted_s, started, ended))

    def _apply(self, verdict: Verdict) -> Effects:
        return self._replica.apply(verdict)

    def _require_group(self) -> None:
        self._home.require_here()
        self._rounds.require_going()

    def _follow(self, outcome: tuple[_T, Effects]) -> _T:
        """Pass the effects of a command or verdict to this rank's parts; return the answer."""
        answer, effects = outcome
        self._observer.follow(effects)
        if effects is not NOTHING:
            if effects.expectations:
                self._ballot.follow(effects.expectations)
            if effects.orders:
                self._executor.carry_out(effects.orders)
            if effects.decisions:
                self._staging.decide(effects.decisions)
            self._freed += effects.freed
            if effects.events and self._listener is not None:
                self._listener(effects.events)
            for number, content in self._requests.agree(effects.requests):
                self._follow(self._replica.commit_message(number, content))
                self._requests.carry_out(number, content)
        return answer


def _warn_of_unwritten(rank: int, flushed: Flushed) -> None:
    if flushed.unwritten:
        causes = ", ".join(f"{cause} {pages}" for cause, pages in flushed.unwritten.items())
        log.warning("rank %d closes with unwritten pages: %s", rank, causes)
