"""One decider and several workers in one thread, whose executors do what a test tells them to.

A step goes as an engine's: the scheduler's half, what it sends, each worker, and their ballots back.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import reduce
from typing import Any

from lockstep.coordinator.collectives.engine_channel import FoldedBallots
from lockstep.coordinator.lanes import BallotShape
from lockstep.ranks.group.decider.deciding import DecidingCache, decide
from lockstep.ranks.group.decider.worker import WorkerRank
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import HostCacheConfig, RankCacheConfig
from lockstep.ranks.protocol.dispatch import Opened
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from tests.kit.ranks.in_turn import HostRanksInTurn


class DecidedRanksInTurn(HostRanksInTurn):
    """Ranks whose replica is elsewhere; `caches` has the decider's alone."""

    workers: list[WorkerRank]

    def __init__(self, ranks: int = 2, **settings: Any) -> None:
        """`settings` are those of `InTurn`."""
        super().__init__(ranks, depth=1, **settings)
        self.caches = self.caches[:1]

    @property
    def decider(self) -> DecidingCache:
        """The decider's cache."""
        [cache] = self.caches
        assert isinstance(cache, DecidingCache)
        return cache

    def _cache(self, rank: int, config: RankCacheConfig) -> HostCache:
        assert isinstance(config, HostCacheConfig)
        replica = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"model")
        if not rank:
            shape = BallotShape(world_size=len(self.executors), seats=config.bounds.prefetches)
            self.workers = [
                WorkerRank(each, shape, at, clock_ms=self._clock_of(at))
                for at, each in enumerate(self.executors)
            ]
        if rank:
            # Of which only the first is kept, which alone can be asked.
            config = replace(config, control=None)
        ranks = len(self.executors)
        return decide(Opened(each, ranks, config, replica, "") for each in range(ranks))

    def _clock_of(self, rank: int) -> Callable[[], int]:
        return lambda: self.now_ms[rank]

    def schedule(self) -> bytes:
        """Do the scheduler's half of a step; return what it sends to the workers."""
        self.decider.begin_step()
        self.decider.end_step()
        return self.decider.dispatch()

    def work(self, sent: bytes, absent: Collection[int] = ()) -> FoldedBallots | None:
        """Let every worker do its half of a step; return the ballots, but for those of `absent`."""
        ballots: list[FoldedBallots] = []
        for worker in self.workers:
            worker.obey(sent)
            worker.begin_loads()
            worker.begin_backups()
            ballot = worker.vote()
            if ballot is not None and worker.rank not in absent:
                ballots.append(ballot)
        return reduce(FoldedBallots.joined, ballots) if ballots else None

    def step(self) -> None:
        """Do one step of the engine and apply what comes of it."""
        self.decider.deliver(self.work(self.schedule()))
        self.decider.begin_step()
        self.decider.inspection.check()
