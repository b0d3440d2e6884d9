"""Simulates operators who attach and detach stores while requests run.

An operator asks some or all ranks to attach a store, or to detach the attached one. This proposal
reaches each rank at a different moment, and sometimes one rank gets a different proposal. After every
step all ranks must use the same store. A proposal must be applied on all ranks or on none, and must end
in bounded time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from ..coordinator.proposal import Change, Proposal
from ..errors import LockstepError, UsageError
from ..ranks.group.member.rank_cache import RankCache
from ..ranks.replica.attaching import StoreState
from ..ranks.replica.operations.quarantine import KEEPS_TOO_MUCH
from .rank.executor import SimulatedExecutor
from .rank.stores import FIRST_STORE, OTHER_STORE
from .world.violated import Violated
from .world.world import World

_WITHOUT = (StoreState.DETACHED, StoreState.LOST)
_STEPS_TO_END = 4
"""A proposal must end at most this many steps after its timeout."""


@dataclass(frozen=True, slots=True)
class _Errand:
    """A proposal that is to reach one rank in a given step."""

    step: int
    rank: int
    proposal: Proposal
    between: bool
    """Whether the proposal arrives between the two halves of the step, instead of before the step."""


@dataclass(slots=True, eq=False)
class _Delivery:
    """A proposal that has reached one rank, with its outcome on this rank."""

    rank: int
    proposal: Proposal
    outcome: "Future[None]"
    since_us: int
    late_steps: int = 0
    ended_in: int = 0
    """Number of rounds that the rank had taken when the proposal ended. It distinguishes equal
    proposals."""


class Proposing:
    """Draws a schedule's proposals to attach and detach stores, and checks their outcomes."""

    def __init__(
        self,
        world: World,
        *,
        coverage: Counter[str],
        trace: Callable[[str], None],
    ) -> None:
        self._random = world.stream("stores")
        self._rate = self._random.choice((0.0, 0.0, 0.0, 0.01, 0.05))
        self.refusals = 0.0 if world.faults.calm else self._random.choice((0.0, 0.1, 0.3))
        """The chance that a rank cannot open a store that it is asked to attach."""
        self._can_attach = world.config.host_pages > 0
        # A proposal may end later than its timeout: clock faults stop the clock, and in a pair the
        # other group's steps take time between this group's steps.
        slack_us = world.faults.still_us + _STEPS_TO_END * world.meanwhile_us
        self._patience_us = int(world.config.timeouts.open_s * 1_000_000) + slack_us
        self._coverage = coverage
        self._trace = trace
        self._caches: Sequence[RankCache] = ()
        self._executors: Sequence[SimulatedExecutor] = ()
        self._steps = 0
        self._errands: list[_Errand] = []
        self._deliveries: list[_Delivery] = []
        self._attached = False
        """Whether a store was attached at the end of the previous step."""
        self._recorded: int = 0
        """Length of the replica's journal (the log of its changes) at the end of the previous step."""

    def begin_epoch(
        self, caches: Sequence[RankCache], executors: Sequence[SimulatedExecutor]
    ) -> None:
        """Continue with the caches of a new group, to which no proposal has been made."""
        self._caches, self._executors = caches, executors
        self._errands.clear()
        self._deliveries.clear()
        self._attached = caches[0].store_state() is StoreState.ATTACHED
        self._recorded = caches[0].inspection.journal.count
        for executor in executors:
            executor.stores.refusals = self.refusals

    def step(self, now_us: int) -> None:
        """Before a step: draw whether to propose an attach or a detach, and deliver due proposals."""
        self._steps += 1
        rate = self._rate
        if self._caches[0].store_state() in _WITHOUT:
            # Raise the rate of proposals while no store is attached, so that a store is attached most
            # of the time.
            rate *= 5
        if self._can_attach and self._random.random() < rate:
            self._begin_campaign()
        self.deliver(now_us, between=False)

    def deliver(self, now_us: int, *, between: bool) -> None:
        """Deliver to the ranks the proposals that are due now."""
        due = [e for e in self._errands if e.step <= self._steps and e.between == between]
        self._errands = [errand for errand in self._errands if errand not in due]
        for errand in due:
            cache, proposal = self._caches[errand.rank], errand.proposal
            try:
                if proposal.change is Change.ATTACH:
                    outcome = cache.attach_store(proposal.store)
                else:
                    outcome = cache.detach_store()
            except UsageError:
                if not any(
                    d.rank == errand.rank and d.proposal != proposal for d in self._deliveries
                ):
                    raise
                self._coverage["proposals put off"] += 1
                continue
            self._trace(f"rank {errand.rank} is told: {proposal}")
            delivery = _Delivery(errand.rank, proposal, outcome, now_us)
            outcome.add_done_callback(partial(self._ends, delivery))
            self._deliveries.append(delivery)

    def check(self, now_us: int) -> None:
        """After a step: raise if ranks use different stores, or if a proposal's outcomes differ."""
        states = [cache.store_state() for cache in self._caches]
        used = [executor.stores.in_use for executor in self._executors]
        if len(set(states)) > 1 or len(set(used)) > 1:
            raise Violated(f"the ranks have different stores: {[*map(str, states)]}, {used}")
        if (used[0] is None) != (states[0] in {*_WITHOUT, StoreState.ATTACHING}):
            has = "none of them uses a store" if used[0] is None else f"they use {used[0]}"
            raise Violated(f"the store is {states[0]} on every rank, but {has}")
        self._check_ended_alike([each for each in self._deliveries if each.outcome.done()])
        self._deliveries = [each for each in self._deliveries if not each.outcome.done()]
        self._attached = states[0] is StoreState.ATTACHED
        self._recorded = self._caches[0].inspection.journal.count
        for delivery in self._deliveries:
            delivery.late_steps += now_us - delivery.since_us > self._patience_us
            if delivery.late_steps > _STEPS_TO_END:
                received = f"rank {delivery.rank} received the proposal {delivery.proposal}"
                raise Violated(f"{received}, which does not end")

    def check_rest(self) -> None:
        """When nothing is in flight: raise if a store is still being detached."""
        if self._caches[0].store_state() is StoreState.DRAINING:
            raise Violated("nothing is in flight, but the store is still being detached")

    def check_gone(self, rank: int) -> None:
        """After an epoch: raise if a proposal to this rank still has no outcome."""
        if any(each.rank == rank and not each.outcome.done() for each in self._deliveries):
            raise Violated(
                f"rank {rank} has left its group, but one of its proposals has no outcome"
            )

    def _begin_campaign(self) -> None:
        random, ranks = self._random, range(len(self._caches))
        attached = self._caches[0].store_state() is StoreState.ATTACHED
        if random.random() < (0.8 if attached else 0.05):
            proposal = Proposal(Change.DETACH)
        else:
            uri = FIRST_STORE if random.random() < 0.7 else OTHER_STORE
            proposal = Proposal(Change.ATTACH, uri)
        receivers = list(ranks)
        if random.random() < 0.15:
            receivers = random.sample(receivers, random.randint(1, len(receivers)))
        span = random.choice((1, 3, 10))
        odd = random.choice(ranks) if random.random() < 0.1 else None
        for rank in receivers:
            its = proposal
            if rank == odd:
                its = Proposal(Change.ATTACH, random.choice((FIRST_STORE, OTHER_STORE)))
            step = self._steps + random.randrange(span)
            self._errands.append(_Errand(step, rank, its, random.random() < 0.5))

    def _check_ended_alike(self, ended: Sequence[_Delivery]) -> None:
        if not ended:
            return
        had_store = self._had_store()
        groups: defaultdict[tuple[int, Proposal], list[_Delivery]] = defaultdict(list)
        for delivery in sorted(ended, key=attrgetter("ended_in")):
            groups[delivery.ended_in, delivery.proposal].append(delivery)
        for (_, proposal), mine in groups.items():
            errors = [each.outcome.exception() for each in mine]
            done = sum(error is None for error in errors)
            if done and done != len(errors):
                raise Violated(
                    f"{proposal} was applied on only {done} of the ranks that received it"
                )
            needs_all = proposal.change is Change.ATTACH or had_store
            if done and needs_all and {each.rank for each in mine} != set(range(len(self._caches))):
                raise Violated(f"{proposal} was applied although not every rank received it")
            if done:
                had_store = proposal.change is Change.ATTACH
                self._coverage[f"stores {proposal.change.name.lower()}ed"] += 1
            elif isinstance(errors[0], LockstepError):
                self._coverage["proposals withdrawn"] += 1

    def _ends(self, delivery: _Delivery, outcome: "Future[None]") -> None:
        del outcome
        delivery.ended_in = self._caches[delivery.rank].inspection.rounds

    def _had_store(self) -> bool:
        """Return whether a store was attached when the ranks decided on the latest proposals.

        The store may have been detached in the same step without a proposal: a group detaches a store
        whose I/O keeps too many pages in quarantine.
        """
        journal = self._caches[0].inspection.journal
        _, entries = journal.last(journal.count - self._recorded)
        let_go = any(entry.endswith(KEEPS_TOO_MUCH) for entry in entries)
        return self._attached and not let_go
