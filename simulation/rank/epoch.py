"""One epoch of a schedule: new processes with empty memory, on stores that outlive the processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...coordinator.collective import Collective
from ...ranks.group.cache import Cache
from ...ranks.group.host_cache import HostCache
from ...ranks.group.member.group_rank import Substitutes
from ...ranks.group.member.rank_cache import RankCache
from ...ranks.group.member.request_log import RequestLog
from ...ranks.protocol.replica_config import ReplicaConfig
from ...ranks.replica.parts import SOUND, Parts
from ..world.clock import RankClock, VirtualClock
from ..world.faults import FaultSource
from ..world.violated import Record
from ..world.world import ENGINE, World
from .cluster import Cluster
from .conditions import Conditions
from .copies import Copies
from .executor import SimulatedExecutor
from .memory import SimulatedStore, SymbolicMemory
from .stores import FIRST_STORE, RankStores

_PAGE_BYTES = 1 << 10
"""Assumed bytes per page; only the counters of moved bytes depend on this number."""

MakeExecutor = Callable[[Conditions, SymbolicMemory, SimulatedStore], SimulatedExecutor]
"""Creates one rank's executor from its conditions, its memory and its store."""


def make_executor(
    conditions: Conditions,
    memory: SymbolicMemory,
    store: SimulatedStore,
    *,
    kind: type[SimulatedExecutor] = SimulatedExecutor,
    copies: type[Copies] = Copies,
) -> SimulatedExecutor:
    """Return a rank's executor; `kind` and `copies` are classes with a revived bug, if given."""
    return kind(conditions, memory=memory, store=store, page_bytes=_PAGE_BYTES, copies=copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The classes from which a schedule's ranks are built; a revived bug replaces some of them."""

    make: MakeExecutor = make_executor
    parts: Parts = SOUND
    """The classes from which the replica is built."""
    cache: type[Cache] = Cache
    """The cache class for device pages owned by the replica."""
    host_cache: type[HostCache] = HostCache
    """The cache class for device pages owned by the engine."""
    log: type[RequestLog] = RequestLog


SOUND_BUILD = Build()


@dataclass(slots=True)
class Epoch:
    """The group of one epoch: its caches, executors and memories."""

    cluster: Cluster
    executors: list[SimulatedExecutor]
    memories: list[SymbolicMemory]
    """Simulated device and host memory of each rank, by rank."""
    logs: list[RequestLog]
    """Each rank's log of received control requests, by rank."""
    sick: set[int] = field(default_factory=set[int])

    @property
    def caches(self) -> list[RankCache]:
        return self.cluster.caches

    @property
    def lost(self) -> str | None:
        """How hung copies prevent all ranks from continuing; None if the ranks can continue.

        One hung copy into engine-owned device pages is enough. Other copies prevent it only if many
        hang.
        """
        if any(executor.lost_device for executor in self.executors):
            return "device lost"
        return "too many copies hang" if any(each.inspection.lost for each in self.caches) else None


def begin_epoch(
    world: World,
    number: int,
    *,
    clock: VirtualClock,
    clocks: Sequence[RankClock],
    stores: Sequence[RankStores],
    faults: FaultSource,
    find: Record,
    build: Build,
) -> Epoch:
    """Start the group of epoch `number`, whose random draws differ from those of other epochs."""
    config = world.config
    pools = config.pool_sizes()
    replica_config = ReplicaConfig.of(
        config,
        pools=pools,
        model_digest=b"simulated",
        engine_pages=world.device_pages if world.l1 == ENGINE else 0,
    )
    executors: list[SimulatedExecutor] = []
    memories: list[SymbolicMemory] = []
    logs = [build.log() for _ in range(world.ranks)]

    def make_cache(rank: int, collective: Collective) -> RankCache:
        memory = SymbolicMemory(world.pools, find, rank)
        conditions = Conditions(
            rank,
            clock=clock,
            faults=faults,
            random=world.stream(f"executor/{number}/{rank}"),
            find=find,
        )
        executor = build.make(conditions, memory, stores[rank].named(FIRST_STORE))
        executor.stores.find = stores[rank].named
        if config.store is None:
            executor.stores.detach()
        executor.lends_device = world.l1 == ENGINE
        memories.append(memory)
        executors.append(executor)
        kind = build.host_cache if world.l1 == ENGINE else build.cache
        cache = kind(
            config,
            collective,
            executor,
            replica_config,
            substitutes=Substitutes(clock_ms=clocks[rank].now_ms, parts=build.parts),
        )
        cache.take_requests(logs[rank])
        return cache

    cluster = Cluster(world.ranks, depth=world.depth, clock=clock, make=make_cache)
    return Epoch(cluster, executors, memories, logs)
