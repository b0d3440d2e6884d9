"""One schedule: the world drawn from a seed, run step by step, with all checks after every step."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from traceback import extract_tb

from ..coordinator.operation import Phase
from ..errors import (
    CollectiveTimeout,
    DivergenceError,
    GroupError,
    LockstepError,
    PeerLost,
    RankUnhealthy,
)
from ..ranks.replica.operations.store import RENEWED_S
from .checkers.checkers import (
    DeadlineChecker,
    ReplicaChecker,
    TreeChecker,
    check_at_rest,
    check_time,
)
from .checkers.written import check_written, check_written_again, promises_anything
from .engine.lending_workload import LendingWorkload
from .engine.workload import Workload
from .proposing import Proposing
from .rank.epoch import SOUND_BUILD, Build, Epoch, begin_epoch
from .rank.stores import FIRST_STORE, RankStores
from .requesting import Requesting
from .result import ScheduleResult, Violation
from .world.clock import RankClock, VirtualClock
from .world.contents import ExpectedContents
from .world.faults import ClockFault, FaultSource, Mishap
from .world.violated import Violated
from .world.world import BOTH, ENGINE, World, draw_world

_THOROUGH_EVERY = 8
"""Number of steps between comparisons of the replicas' whole states."""
_TREE_EVERY = 3
"""Number of steps between comparisons of the prefix tree with every rank's memory."""
_DRAIN_STEPS_MAX = 2_000
_LATE_ENDS_US = 6_000_000
"""Virtual time after which every transfer that ever completes has completed."""
_RENEWED_US = int(1_000_000 * RENEWED_S) + 1_000_000
"""Virtual time after which a group no longer assumes that objects that it wrote are in the store."""
_WRITE_OUTS_MAX = 8
_STEPS_TO_NOTICE = 2
"""Maximum number of steps until all ranks notice that a rank is lost; 2, as a round may be in flight.
"""

_LOSS = (PeerLost, CollectiveTimeout)
_EXPECTED: dict[Mishap, tuple[type[GroupError], ...]] = {
    Mishap.DEAD_RANK: _LOSS,
    Mishap.SILENT_RANK: _LOSS,
    Mishap.UNHEALTHY_RANK: (RankUnhealthy,),
    Mishap.SAMPLED_APART: (DivergenceError,),
}
_EVERYBODY_STEPS = (Mishap.UNHEALTHY_RANK, Mishap.SAMPLED_APART)
"""Faults after which the affected rank still takes steps until the epoch ends."""


class _CopiesLost(Exception):
    """Raised when every rank has ended the epoch because of copies that never complete."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """State, other than the clock, that the groups of a pair share."""

    result: ScheduleResult
    contents: ExpectedContents = field(default_factory=ExpectedContents)
    meanings: dict[tuple[str, bytes], int] = field(default_factory=dict[tuple[str, bytes], int])
    """By pool and page key: the content of objects under this key; see `SimulatedStore`."""


class Schedule:
    """Runs one group's schedule once, with the settings and faults of the given world."""

    def __init__(
        self,
        world: World,
        *,
        record: bool = False,
        build: Build = SOUND_BUILD,
        clock: VirtualClock | None = None,
        around: Surroundings | None = None,
    ) -> None:
        """Create the schedule; groups of a pair share time (`clock`) and other state (`around`)."""
        self.world = world
        if around is None:
            result = ScheduleResult(seed=world.seed, l1=world.l1, profile=world.profile)
            around = Surroundings(result)
        self.result = around.result
        self._record = record
        self._build = build
        self._random = world.stream("schedule")
        self._clock = clock or VirtualClock()
        self._clocks = [RankClock(self._clock, ahead_ms) for ahead_ms in world.faults.skews_ms]
        self._contents = around.contents
        self._findings: list[str] = []
        self._faults = FaultSource(world.faults, world.stream("faults"), self.result.faults)
        self._stores = [RankStores(around.meanings, rank) for rank in range(world.ranks)]
        self._trees = TreeChecker(self._contents, world.config)
        self._deadlines = DeadlineChecker(
            world.config,
            step_us_max=world.whole_step_us_max,
            still_us=world.faults.still_us,
        )
        self._workload = (LendingWorkload if world.l1 == ENGINE else Workload)(
            world,
            contents=self._contents,
            faults=self._faults,
            coverage=self.result.coverage,
            trace=self._trace if record else None,
        )
        self._proposing = Proposing(world, coverage=self.result.coverage, trace=self._trace)
        self._requesting = Requesting(world, coverage=self.result.coverage, trace=self._trace)
        self._epoch = self._begin_epoch()
        for fault, struck in (
            (Mishap.TINY_POOLS, world.faults.tiny_pools),
            (Mishap.TINY_BOUNDS, world.faults.tiny_bounds),
            (Mishap.SLOW_RANK, max(world.faults.paces) > 1),
            (Mishap.CLOCK_SKEW, any(world.faults.skews_ms)),
        ):
            if struck:
                self._faults.count(fault)

    def run(self) -> ScheduleResult:
        """Run until the schedule ends or a rule is violated, and return the result."""
        for _ in self.steps():
            pass
        return self.result

    def steps(self) -> Iterator[None]:
        """Run until the schedule ends or a rule is violated, and yield after each step."""
        step = 0
        try:
            while step < self.world.steps:
                self._step(step)
                step += 1
                yield
            if not self._end(last=True):
                # Hung copies have ended the epoch, so its group cannot be drained. Start a new group
                # and drain that one; it has no copies that can hang.
                self._begin_anew()
                self._end()
        except Violated as violated:
            self._violated(step, str(violated))
        except (LockstepError, AssertionError, LookupError, TypeError, ValueError) as error:
            self._violated(step, _crashed(error))
        self._count()

    def _violated(self, step: int, finding: str) -> None:
        self._trace(f"violated: {finding}")
        self.result.violation = Violation(
            seed=self.world.seed, step=step, finding=finding, replay=self.world.replay
        )

    def _step(self, step: int) -> None:
        fault = self.world.faults.group_faults.get(step)
        if fault is not None:
            self._strike(*fault)
        clock_fault = self.world.faults.clock_faults.get(step)
        if clock_fault is not None:
            self._strike_clocks(clock_fault)
        self._workload.step()
        self._proposing.step(self._clock.now_us)
        self._requesting.step()
        self._raise_findings()
        try:
            self._take_step(active=True)
        except _CopiesLost:
            self._begin_anew()
        if self._faults.strikes(Mishap.LOST_OBJECT):
            stores = self._stores[self._random.randrange(self.world.ranks)]
            stores.named(FIRST_STORE).lose(self._random.randrange(1 << 16))
        self.result.steps += 1

    def _take_step(self, *, active: bool = False) -> None:
        """Let every rank take one step, and run all checks."""
        cluster, half_us = self._epoch.cluster, self.world.step_us_max // 2
        self._clock.advance(self._random.randrange(200, half_us))
        errors = cluster.begin_step(self._random.randrange(200, half_us))
        if not any(errors):
            self._proposing.deliver(self._clock.now_us, between=True)
            self._requesting.deliver(between=True)
        idle_s = 0.0 if any(errors) else self._workload.decide(active=active)
        errors = cluster.end_step(idle_s=idle_s)
        if not any(errors):
            self._workload.forward()
        self._clock.advance(self._random.randrange(half_us))
        self._trace_step()
        self._raise_findings()
        lost = self._epoch.lost
        if lost and all(isinstance(error, RankUnhealthy) for error in errors):
            self.result.coverage[lost] += 1
            for rank in range(self.world.ranks):
                self._check_ended(rank)
            raise _CopiesLost
        for rank, error in enumerate(errors):
            if error is not None:
                self._unexpected(rank, error)
        self._check()

    def _unexpected(self, rank: int, error: GroupError) -> None:
        cluster, name = self._epoch.cluster, type(error).__name__
        what = f"rank {rank} ends the epoch without a fault: {name}: {error}"
        if isinstance(error, DivergenceError):
            what += f"; {cluster.first_difference()}"
        elif isinstance(error, CollectiveTimeout) and (absent := cluster.absent()) is not None:
            what += f"; rank {absent} did not join the round"
        raise Violated(what)

    def _check(self) -> None:
        epoch, steps = self._epoch, self._epoch.cluster.steps
        self._replicas.check(steps, thorough=steps % _THOROUGH_EVERY == 0)
        check_time(epoch.caches[0], [clock.now_ms() for clock in self._clocks])
        self._deadlines.check(epoch.caches[0], self._clock.now_us)
        if steps % _TREE_EVERY == 0:
            self._trees.check(epoch.caches[0], epoch.memories)
        self._workload.check_pages()
        self._proposing.check(self._clock.now_us)
        self._requesting.check()
        in_flight = epoch.caches[0].inspection.in_flight.values()
        differing = sum(each.phase is Phase.RESTORABLE for each in in_flight)
        self.result.coverage["steps in which ranks look for a common length"] += differing

    def _strike(self, fault: Mishap, rank: int) -> None:
        self._faults.count(fault)
        self._trace(f"{fault} strikes rank {rank}")
        if fault is Mishap.RESTART:
            if self._random.random() < 0.6:
                self._end()
        elif self.world.ranks > 1:
            self._lose(fault, rank)
        self._begin_anew()

    def _strike_clocks(self, clock_fault: ClockFault) -> None:
        self._faults.count(clock_fault.fault)
        self._trace(f"{clock_fault}")
        for rank in clock_fault.ranks:
            if clock_fault.fault is Mishap.CLOCK_LEAP:
                self._clocks[rank].leap(clock_fault.duration_ms)
            else:
                self._clocks[rank].stand_still(clock_fault.duration_ms)

    def _begin_anew(self) -> None:
        """End all processes of the group abruptly, and start new ones on the same stores."""
        self._count()
        for executor in self._epoch.executors:
            executor.close()
        self._clock.forget_plans()
        self._epoch = self._begin_epoch()

    def _end(self, *, last: bool = False) -> bool:
        """Drain the group and close it; return False if hung copies ended the epoch first."""
        try:
            self._come_to_rest()
            if last and isinstance(self._workload, Workload):
                self._check_written_again(self._workload)
        except _CopiesLost:
            return False
        self._close()
        return True

    def _check_written(self) -> None:
        """Switch faults off, write all unwritten pages to the store, and raise if one is missing."""
        self._faults.over = True
        self._write_out()
        stores = [each.named(FIRST_STORE) for each in self._stores]
        check_written(self._epoch.caches[0].inspection, stores)
        self._faults.over = False

    def _check_written_again(self, workload: Workload) -> None:
        """Empty the stores and serve old prompts again; raise unless their pages are rewritten."""
        stores = [each.named(FIRST_STORE) for each in self._stores]
        seen = self._epoch.caches[0].inspection
        if not promises_anything(seen):
            return
        self._faults.over = True
        for store in stores:
            store.empty()
        self._clock.advance(_RENEWED_US)
        self._take_step()
        served = workload.serve_again(self._take_step)
        self._write_out()
        check_written_again(seen, stores, served)
        self.result.coverage["served again after the store was emptied"] += len(served)

    def _write_out(self) -> None:
        """Write all unwritten pages to the store; writes already in flight may still fail."""
        backlogs = self._epoch.caches[0].inspection.prefixes.allocator.backlogs
        for count in range(_WRITE_OUTS_MAX):
            if count > 1 and not any(backlogs):
                return
            for cache in self._epoch.caches:
                cache.write_out()
            self._settle()

    def _lose(self, fault: Mishap, rank: int) -> None:
        """Make one rank fail or diverge; raise unless all other ranks detect this in the same step."""
        epoch = self._epoch
        missing = None if fault in _EVERYBODY_STEPS else rank
        if fault is Mishap.UNHEALTHY_RANK:
            epoch.executors[rank].sick = "its device is lost"
        if fault is Mishap.SAMPLED_APART:
            self._workload.sample_apart(rank)
        if fault is Mishap.DEAD_RANK:
            epoch.executors[rank].close()
            epoch.cluster.collectives[rank].close()
        others = [each for each in range(self.world.ranks) if each != missing]
        errors: list[GroupError | None] = []
        for _ in range(_STEPS_TO_NOTICE):
            errors = epoch.cluster.step(1_000, missing)
            if any(errors):
                break
        expected = _EXPECTED[fault] + ((RankUnhealthy,) if epoch.lost else ())
        for each in others:
            if not isinstance(errors[each], expected):
                raise Violated(
                    f"{fault} struck rank {rank}, but rank {each} raised {errors[each]!r}; all ranks:"
                    f" {errors}"
                )
            self._check_ended(each)

    def _check_ended(self, rank: int) -> None:
        """After an epoch: raise unless the rank refuses to step, stops voting, and can be closed."""
        cache, collective = self._epoch.caches[rank], self._epoch.cluster.collectives[rank]
        reached = len(collective.reached)
        try:
            cache.step()
        except GroupError:
            pass
        else:
            raise Violated(f"rank {rank} can still step after the epoch has ended")
        cache.close()
        self._proposing.check_gone(rank)
        if len(collective.reached) != reached:
            raise Violated(f"rank {rank} reaches a collective after the epoch has ended")

    def _begin_epoch(self) -> Epoch:
        self.result.epochs += 1
        epoch = begin_epoch(
            self.world,
            self.result.epochs,
            clock=self._clock,
            clocks=self._clocks,
            stores=self._stores,
            faults=self._faults,
            find=self._findings.append,
            build=self._build,
        )
        self._workload.begin_epoch(epoch.caches, epoch.memories)
        self._proposing.begin_epoch(epoch.caches, epoch.executors)
        self._requesting.begin_epoch(epoch.caches, epoch.logs)
        self._deadlines.begin_epoch()
        self._replicas = ReplicaChecker(epoch.caches)
        return epoch

    def _come_to_rest(self) -> None:
        """Release all requests, and let the group complete its work.

        Raises `Violated` if an operation does not end (unless it is quarantined), if a page that must
        be in the store is missing, or if not all pages can be allocated. The last check is left out if
        operations are in flight that are all quarantined.
        """
        self._workload.drain()
        self._settle()
        self._check_written()
        in_flight = self._epoch.caches[0].inspection.in_flight
        for _ in range(_DRAIN_STEPS_MAX):
            # Pages of quarantined operations cannot be allocated, so do not check that all pages can
            # be.
            if in_flight and all(each.phase is Phase.QUARANTINED for each in in_flight.values()):
                return
            if self._workload.probe():
                break
            self._take_step()
        else:
            raise Violated(f"an idle group has no room for a request in {_DRAIN_STEPS_MAX} steps")
        self._take_step()
        self._settle()

    def _settle(self) -> None:
        """Take steps until only quarantined operations are in flight, then check the group at rest."""
        seen = self._epoch.caches[0].inspection
        for _ in range(_DRAIN_STEPS_MAX):
            self._take_step()
            if not seen.idle:
                continue
            before = set(seen.in_flight)
            self._clock.advance(_LATE_ENDS_US)
            # Take some more steps, because reports may be late, and only one quarantined operation may
            # settle in each step.
            for _ in range(6 + len(seen.in_flight)):
                self._take_step()
                self._clock.advance(20_000)
            # Repeat if a delayed backup has started. It was waiting for quarantined pages, or for a
            # retry.
            if set(seen.in_flight) <= before and seen.idle:
                break
        else:
            raise Violated(f"the group does not come to rest in {_DRAIN_STEPS_MAX} steps")
        self._check_rest()

    def _check_rest(self) -> None:
        epoch = self._epoch
        check_at_rest(epoch.caches[0], epoch.memories, [e.restless() for e in epoch.executors])
        self._trees.check(epoch.caches[0], epoch.memories)
        self._proposing.check_rest()
        self._raise_findings()

    def _close(self) -> None:
        for rank, cache in enumerate(self._epoch.caches):
            cache.close(flush=False)
            stats = cache.stats()
            if not stats.steps == stats.rounds == stats.collectives:
                counts = f"{stats.rounds} rounds and {stats.collectives} collectives"
                raise Violated(f"rank {rank} counts {stats.steps} steps, {counts}")

    def _count(self) -> None:
        cluster = self._epoch.cluster
        self.result.rounds += cluster.steps
        self.result.collectives_per_step_max = max(
            self.result.collectives_per_step_max, cluster.collectives_per_step_max
        )
        for kind, outcomes in cluster.caches[0].stats().operations.items():
            for outcome, count in outcomes.items():
                self.result.operations[kind] += count
                self.result.outcomes[f"{kind} {outcome}"] += count

    def _raise_findings(self) -> None:
        if self._findings:
            raise Violated(self._findings[0])

    def _trace_step(self) -> None:
        digest = self._epoch.caches[0].inspection.digest
        line = f"step {self._epoch.cluster.steps} at {self._clock.now_us} us: {digest:x}"
        self.result.fingerprint = zlib.crc32(line.encode(), self.result.fingerprint)
        self._trace(line)

    def _trace(self, line: str) -> None:
        if self._record:
            self.result.transcript.append(line)


def _crashed(error: Exception) -> str:
    """Return (as one text) the place and message of an unexpected exception, for a violation."""
    frame = extract_tb(error.__traceback__)[-1]
    module = frame.filename.rsplit("/", 1)[-1]
    message = f": {error}" if str(error) else ""
    return f"{type(error).__name__} at {module}:{frame.lineno} in {frame.name}{message}"


def run_schedule(
    seed: int,
    *,
    ranks: int = 2,
    steps: int = 100,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int = 1,
    l1: str = BOTH,
    build: Build = SOUND_BUILD,
) -> ScheduleResult:
    """Run the schedule of one seed for a single group; equal arguments give equal runs."""
    world = draw_world(
        seed, ranks=ranks, steps=steps, profile=profile, faults=faults, depth=depth, l1=l1
    )
    return Schedule(world, build=build).run()
