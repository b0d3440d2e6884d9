"""The decider's process: the replica of a group whose ranks are workers of an engine.

    commands --> REPLICA --effects--> dispatch ==engine==> EXECUTOR, BALLOT of each worker
                    ^                                              |
                    +------- verdict <-- fold <====engine==========+

It is the cache that a rank has under an engine with pages of its own, with other parts: what is told
to ballot and executor is kept for the next dispatch, and the transport is the engine's channel.
Nothing here touches a page, waits for anybody, or runs a round on its own: the engine steps, and as
long as it does not, nothing ends.
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
    Told,
    Vote,
)
from ...protocol.orders import Direction, Order
from ...replica.parts import Parts
from ..control.opening import controlled_alone
from ..host_cache import HostCache
from ..member.cache_stats import CacheStats
from ..member.member import ROUND_TIMES_KEPT, Listener, Substitutes


class _Outgoing:
    """What the workers are to be told with the next step, in its order."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.asked: Vote | None = None
        """The last round that they were told to vote in."""
        self._number = 0

    def take(self) -> bytes:
        """Return it as bytes, and begin anew."""
        self._number += 1
        told, self.told = self.told, []
        return DISPATCHES.encode(Dispatch(self._number, tuple(told)))


class _DistantBallot(Ballot):
    """Stands for the ballots of all workers."""

    def __init__(self, outgoing: _Outgoing, shape: BallotShape, rank: int) -> None:
        super().__init__(shape, rank)
        self._outgoing = outgoing

    def follow(self, expectations: Iterable[Expectation]) -> None:
        self._outgoing.told.append(Expect(tuple(expectations)))

    def fill(self, layout: LaneLayout, voter: Voter) -> Vector:
        """Have every worker vote; the lanes that come back are those of the header alone."""
        asked = Vote(layout.epoch, layout.round, layout.state_digest, layout.seats.digest)
        self._outgoing.asked = asked
        self._outgoing.told.append(asked)
        return super().fill(layout, voter)


class _DistantExecutors:
    """Stands for the executors of all workers; see `Executor`."""

    def __init__(self, outgoing: _Outgoing, serving_address: str) -> None:
        self._outgoing = outgoing
        self._serving_address = serving_address
        self.by_rank: Mapping[int, ExecutorCounts] = {}
        """What each worker has last told of its own."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        self._outgoing.told.append(CarryOut(tuple(orders)))

    def begin_copies(self, direction: Direction) -> None:
        """Each worker begins them where its forward pass stands."""

    def progress(self) -> list[Progress]:
        return []

    def wait(self, timeout_s: float) -> None:
        self._outgoing.told.append(Rest(timeout_s))

    def trouble(self) -> str | None:
        return None

    def stage(self, proposal: Proposal) -> None:
        self._outgoing.told.append(Prepare(proposal.change, proposal.store))

    def readiness(self, proposal: Proposal) -> Readiness | str:  # noqa: ARG002 - the workers say it.
        return Readiness.STAGED

    def unstage(self, proposal: Proposal) -> None:  # noqa: ARG002 - one is staged at most.
        self._outgoing.told.append(GiveUp())

    def serving_address(self) -> str:
        return self._serving_address

    def counts(self) -> ExecutorCounts:
        told = [*self.by_rank.values()]
        total: ExecutorCounts = added(told) if told else ExecutorCounts()
        return total

    def close(self) -> None:
        """The workers close theirs."""


class DecidingCache(HostCache):
    """The cache in the one process that decides, for workers that do.

    A step of the engine: commands, `end_step`, `dispatch`, which goes to every worker with the step;
    and when their ballots come back, `deliver`. Steps may overlap: one that begins before the last
    round's ballots are here applies no verdict and launches no round. What waits elsewhere does not
    wait here: `flush`, `finish_copies` and `run_until_decided` say how far things are, since the
    engine's steps alone bring them further, and `close` leaves the workers to close theirs, which drops
    what has not been written by then.
    """

    def __init__(
        self,
        opened: Opened,
        *,
        listener: Listener | None = None,
    ) -> None:
        """`opened` is what any one of the workers has told; see `decide`."""
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
    def stepping_helps(self) -> bool:
        """Whether a further step would bring something further though no request is computed.

        Not for a prefetch that a request waits for: that request has the engine step, unless it is
        paused, which it is not as long as it steps.
        """
        prefetching = self._replica.prefetching
        waited_for = self._replica.agenda.seats_taken + len(prefetching.waiting)
        works = self._replica.agenda.working.total() > waited_for
        return bool(self._outgoing.told) or works or self.pending_frees

    def begin_step(self) -> None:
        """Apply the verdict of the last round, if all ballots are here; carry out what is asked for."""
        if self._channel.answered:
            super().begin_step()
        # This is the only replica, so a request that is here needs no agreement.
        asked = 0 if self._requests.log is None else self._requests.log.count
        if asked > self._replica.hearing.agreed:
            self._follow(self._replica.agree_on_requests(asked))

    def _end_step(self, idle_s: float) -> None:
        """Launch a round unless one is under way; `dispatch` carries it.

        With `idle_s` each worker waits up to so long for progress before it votes.
        """
        if idle_s and not self._replica.idle:
            self._executor.wait(idle_s)
        if not self._rounds.pending:
            super()._end_step(0.0)
        elif self._channel.asks_again and self._outgoing.asked is not None:
            self._channel.asks_again = False
            self._outgoing.told.append(self._outgoing.asked)

    def log_from(self, level: str) -> None:
        super().log_from(level)
        self._outgoing.told.append(Log(level))

    def dispatch(self) -> bytes:
        """Return what every worker is to be told with this step; once in each, after `end_step`."""
        return self._outgoing.take()

    def deliver(
        self,
        ballots: FoldedBallots | None,
        counts: Mapping[int, ExecutorCounts] = MappingProxyType({}),
    ) -> None:
        """Take the ballots that came back with a step's outputs; None where the engine brought none.

        `counts` are what executors have counted so far, by rank, of the workers that tell it by now.
        """
        if counts:
            # A new one, since any thread may read the statistics.
            self._executors.by_rank = {**self._executors.by_rank, **counts}
        if ballots is not None:
            try:
                self._channel.deliver(ballots)
            except InternalError as error:
                self._rounds.end(error)

    def stats(self, *, rounds: int = ROUND_TIMES_KEPT) -> CacheStats:
        """See `Member.stats`; executors' figures are those of all workers, added up."""
        return replace(super().stats(rounds=rounds), workers=self._executors.by_rank)

    def compare(self, timeout_s: float) -> GroupError | InternalError | None:  # noqa: ARG002
        """There is nobody to compare with: one replica decides."""
        return None

    def close(self, *, flush: bool = True) -> None:  # noqa: ARG002
        """Leave the workers alone, which close by themselves and drop what is still on its way."""
        self.abandon()

    def step_until(self, done: Callable[[], bool], patience_s: float) -> bool:  # noqa: ARG002
        return done()


def decide(told: Iterable[Opened], *, listener: Listener | None = None) -> DecidingCache:
    """Return the cache for the workers that have told this, one for each rank.

    It obeys an operator where its settings say so. Raises `ConfigError` where ranks are missing, where
    they have not been opened together, and where nobody can be listened to.
    """
    by_rank = {each.rank: each for each in told}
    world_size = max((each.world_size for each in by_rank.values()), default=0)
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    if missing or not by_rank:
        raise ConfigError(
            f"the workers of ranks {', '.join(map(str, missing)) or 'none'} have told nothing of"
            " their caches when the engine started"
        )
    if len({each.replica.life for each in by_rank.values()}) != 1:
        raise ConfigError("the workers' caches were not opened together; start the engine anew")
    return controlled_alone(DecidingCache(by_rank[0], listener=listener))
