"""The scheduler's process in one-scheduler mode: the replica of a group whose ranks are workers.

    commands --> REPLICA --effects--> dispatch ==engine==> EXECUTOR, BALLOT of each worker
                    ^                                              |
                    +------- verdict <-- fold <====engine==========+

The class is a `HostCache` that buffers effects for ballot and executor until the next dispatch, and
uses the engine's channel as transport. The scheduler's process has no access to pages and never blocks.
Its rounds run only as part of the engine's steps, so operations finish only if the engine steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from ....coordinator.ballot import Ballot, Progress
from ....coordinator.collective import Vector
from ....coordinator.collectives.engine_channel import EngineChannel, FoldedBallots
from ....coordinator.expectations import Expectation
from ....coordinator.lanes import BallotShape, LaneLayout, Voter
from ....coordinator.proposal import Proposal, Readiness
from ....errors import ConfigError, GroupError, InternalError
from ...executor.base import ExecutorCounts, added
from ...protocol.dispatch import (
    DISPATCHES,
    CarryOut,
    Dispatch,
    Expect,
    GiveUp,
    Log,
    Opened,
    Prepare,
    Rest,
    Vote,
    WorkerMessage,
)
from ...protocol.orders import Direction, Order
from ...replica.parts import Parts
from ..control.control_opening import controlled_alone
from ..host_cache import HostCache
from ..member.cache_stats import CacheStats
from ..member.group_rank import ROUND_TIMES_KEPT, Listener, Substitutes


class _Outgoing:
    """Buffer of the scheduler's messages to all workers for their next step, in order."""

    def __init__(self) -> None:
        self.messages: list[WorkerMessage] = []
        self.last_vote: Vote | None = None
        """The vote message of the last launched round; None before the first round."""
        self._number = 0

    def take(self) -> bytes:
        """Return the buffered messages as one encoded dispatch, and clear the buffer."""
        self._number += 1
        messages, self.messages = self.messages, []
        return DISPATCHES.encode(Dispatch(self._number, tuple(messages)))


class _DistantBallot(Ballot):
    """Takes the place of the workers' ballots in the scheduler's process.

    Buffers two kinds of messages for the workers: which operations to expect, and requests to vote.
    """

    def __init__(self, outgoing: _Outgoing, shape: BallotShape, rank: int) -> None:
        super().__init__(shape, rank)
        self._outgoing = outgoing

    def follow(self, expectations: Iterable[Expectation]) -> None:
        self._outgoing.messages.append(Expect(tuple(expectations)))

    def fill(self, layout: LaneLayout, voter: Voter) -> Vector:
        """Buffer a `Vote` message for all workers; return lanes of which only the header is used."""
        vote = Vote(layout.epoch, layout.round, layout.state_digest, layout.prefetch_slots.digest)
        self._outgoing.last_vote = vote
        self._outgoing.messages.append(vote)
        return super().fill(layout, voter)


class _DistantExecutors:
    """Placeholder for the workers' executors: buffers the orders for the next dispatch."""

    def __init__(self, outgoing: _Outgoing, serving_address: str) -> None:
        self._outgoing = outgoing
        self._serving_address = serving_address
        self.by_rank: Mapping[int, ExecutorCounts] = {}
        """Each worker's executor counters as last received, by rank."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        self._outgoing.messages.append(CarryOut(tuple(orders)))

    def begin_copies(self, direction: Direction) -> None:
        """Do nothing: each worker starts copies around its forward pass."""

    def progress(self) -> list[Progress]:
        return []

    def wait(self, timeout_s: float) -> None:
        self._outgoing.messages.append(Rest(timeout_s))

    def trouble(self) -> str | None:
        return None

    def stage(self, proposal: Proposal) -> None:
        self._outgoing.messages.append(Prepare(proposal.change, proposal.store))

    def readiness(self, proposal: Proposal) -> Readiness | str:  # noqa: ARG002 - the workers say it.
        return Readiness.STAGED

    def unstage(self, proposal: Proposal) -> None:  # noqa: ARG002 - one is staged at most.
        self._outgoing.messages.append(GiveUp())

    def serving_address(self) -> str:
        return self._serving_address

    def counts(self) -> ExecutorCounts:
        counters = [*self.by_rank.values()]
        total: ExecutorCounts = added(counters) if counters else ExecutorCounts()
        return total

    def close(self) -> None:
        """Do nothing: the workers close their executors."""


class SchedulerCache(HostCache):
    """The cache in the scheduler's process, for executors in the workers.

    An engine step consists of commands, `end_step`, `dispatch` (sent to every worker), and `deliver`
    when the ballots return. Steps may overlap: a step that starts before the last round's ballots have
    returned applies no verdict and launches no round.

    Only the engine's steps make progress, so `flush`, `finish_copies` and `run_until_decided` do not
    block but return the current state. Workers close by themselves and drop unwritten pages.
    """

    def __init__(
        self,
        opened: Opened,
        *,
        listener: Listener | None = None,
    ) -> None:
        """Create the cache from `opened`, the message of any one worker; see `decide`."""
        self._outgoing = _Outgoing()
        self._executors = _DistantExecutors(self._outgoing, opened.serving_address)
        self._channel = EngineChannel(opened.world_size)
        super().__init__(
            opened.config,
            self._channel,
            self._executors,
            opened.replica,
            listener=listener,
            substitutes=Substitutes(parts=Parts(ballot=partial(_DistantBallot, self._outgoing))),
        )

    @property
    def can_progress(self) -> bool:
        """Whether a step without scheduled requests would make progress.

        Prefetches alone do not count, because the request that waits for a prefetch makes the engine
        step anyway.
        """
        prefetching = self._replica.prefetching
        waited_for = self._replica.operation_table.prefetch_slots_taken + len(prefetching.waiting)
        works = self._replica.operation_table.working.total() > waited_for
        return bool(self._outgoing.messages) or works or self.pending_frees

    def begin_step(self) -> None:
        """Apply the last round's verdict if all ballots have returned; execute control requests."""
        if self._channel.answered:
            super().begin_step()
        # Count the control requests in the log as received by every rank, because the replica in this
        # process is the only one.
        received = 0 if self._requests.log is None else self._requests.log.count
        if received > self._replica.messages.agreed:
            self._follow(self._replica.agree_on_requests(received))

    def _end_step(self, idle_s: float) -> None:
        """Launch a round unless one is pending. The next `dispatch` announces the round to the workers.

        With `idle_s`, each worker waits up to `idle_s` for progress before voting.
        """
        if idle_s and not self._replica.idle:
            self._executor.wait(idle_s)
        if not self._rounds.pending:
            super()._end_step(0.0)
        elif self._channel.must_repeat and self._outgoing.last_vote is not None:
            self._channel.must_repeat = False
            self._outgoing.messages.append(self._outgoing.last_vote)

    def log_from(self, level: str) -> None:
        super().log_from(level)
        self._outgoing.messages.append(Log(level))

    def dispatch(self) -> bytes:
        """Return the message for every worker. Call once per step, after `end_step`."""
        return self._outgoing.take()

    def deliver(
        self,
        ballots: FoldedBallots | None,
        counts: Mapping[int, ExecutorCounts] = MappingProxyType({}),
    ) -> None:
        """Process the ballots that a step's outputs contain; `ballots` is None if they contain none.

        `counts` are the executor counters by rank, of those workers that sent them.
        """
        if counts:
            # Replace the dict instead of changing it, because any thread may read the statistics.
            self._executors.by_rank = {**self._executors.by_rank, **counts}
        if ballots is not None:
            try:
                self._channel.deliver(ballots)
            except InternalError as error:
                self._rounds.end(error)

    def stats(self, *, rounds: int = ROUND_TIMES_KEPT) -> CacheStats:
        """Return statistics as `GroupRank.stats` does; executor counters are sums over all workers."""
        return replace(super().stats(rounds=rounds), workers=self._executors.by_rank)

    def compare(self, timeout_s: float) -> GroupError | InternalError | None:  # noqa: ARG002
        """Return None, because a single replica cannot differ from another."""
        return None

    def close(self, *, flush: bool = True) -> None:  # noqa: ARG002
        """Leave the group. Workers close by themselves and drop unwritten pages; `flush` is ignored."""
        self.abandon()

    def step_until(self, done: Callable[[], bool], patience_s: float) -> bool:  # noqa: ARG002
        return done()


def decide(opened: Iterable[Opened], *, listener: Listener | None = None) -> SchedulerCache:
    """Create the scheduler's cache from the messages `opened`, one from each worker.

    Accepts control requests if the settings say so. Raises `ConfigError` if ranks are missing, if they
    were not opened together, or if the control socket cannot be created.
    """
    by_rank = {each.rank: each for each in opened}
    world_size = max((each.world_size for each in by_rank.values()), default=0)
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    if missing or not by_rank:
        raise ConfigError(
            f"the workers of ranks {', '.join(map(str, missing)) or 'none'} did not report"
            " their caches when the engine started; see their logs"
        )
    if len({each.replica.life for each in by_rank.values()}) != 1:
        raise ConfigError("the workers' caches were not opened together; restart the engine")
    return controlled_alone(SchedulerCache(by_rank[0], listener=listener))
