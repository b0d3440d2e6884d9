"""One-scheduler mode in one thread: a scheduler's cache, and workers with scripted executors.

A step has the order of a real engine. The scheduler runs its part and sends a message, each worker
processes the message, and the workers' ballots return to the scheduler.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import reduce
from typing import Any

from lockstep.coordinator.collectives.engine_channel import FoldedBallots
from lockstep.coordinator.lanes import BallotShape
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.group.one_scheduler.scheduler_cache import SchedulerCache, decide
from lockstep.ranks.group.one_scheduler.worker import WorkerRank
from lockstep.ranks.protocol.config import HostCacheConfig, RankCacheConfig
from lockstep.ranks.protocol.dispatch import Opened
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from tests.kit.ranks.in_turn import HostRanksInTurn


class DecidedRanksInTurn(HostRanksInTurn):
    """A group in one-scheduler mode: the replica is in the scheduler, and workers have executors only.

    `caches` has one element, the scheduler's cache.
    """

    workers: list[WorkerRank]

    def __init__(self, ranks: int = 2, **settings: Any) -> None:
        """`settings` are the keyword arguments of `InTurn`."""
        super().__init__(ranks, depth=1, **settings)
        self.caches = self.caches[:1]

    @property
    def scheduler_cache(self) -> SchedulerCache:
        [cache] = self.caches
        assert isinstance(cache, SchedulerCache)
        return cache

    def _cache(self, rank: int, config: RankCacheConfig) -> HostCache:
        assert isinstance(config, HostCacheConfig)
        replica = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"model")
        if not rank:
            shape = BallotShape(
                world_size=len(self.executors), prefetch_slots=config.bounds.prefetches
            )
            self.workers = [
                WorkerRank(each, shape, at, clock_ms=self._clock_of(at))
                for at, each in enumerate(self.executors)
            ]
        if rank:
            # Remove the control socket from the other ranks' configurations, because the group uses
            # only rank 0's cache.
            config = replace(config, control=None)
        ranks = len(self.executors)
        return decide(Opened(each, ranks, config, replica, "") for each in range(ranks))

    def _clock_of(self, rank: int) -> Callable[[], int]:
        return lambda: self.now_ms[rank]

    def schedule(self) -> bytes:
        """Run the scheduler's part of a step; return its message to the workers."""
        self.scheduler_cache.begin_step()
        self.scheduler_cache.end_step()
        return self.scheduler_cache.dispatch()

    def work(self, sent: bytes, absent: Collection[int] = ()) -> FoldedBallots | None:
        """Run every worker's part of a step on the message `sent`; return the folded ballots.

        Ballots of ranks in `absent` are left out. Returns None if no ballot remains.
        """
        ballots: list[FoldedBallots] = []
        for worker in self.workers:
            worker.apply_dispatch(sent)
            worker.begin_loads()
            worker.begin_backups()
            ballot = worker.vote()
            if ballot is not None and worker.rank not in absent:
                ballots.append(ballot)
        return reduce(FoldedBallots.joined, ballots) if ballots else None

    def step(self) -> None:
        """Run one engine step, apply the step's verdicts, and check the replica's invariants."""
        self.scheduler_cache.deliver(self.work(self.schedule()))
        self.scheduler_cache.begin_step()
        self.scheduler_cache.inspection.check()
