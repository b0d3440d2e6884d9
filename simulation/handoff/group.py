"""One of two groups: its ranks, each with a scheduler of the small engine, and all that checks them."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from random import Random

from ...page_format.namespace import Namespace
from ...ranks.agreed_pools import pool_layouts
from ...ranks.cache import Cache
from ...ranks.disaggregation.arrivals import Arrivals
from ...ranks.disaggregation.control import Control
from ...ranks.disaggregation.departures import Departures
from ...ranks.disaggregation.early_loads import EarlyLoads
from ...ranks.disaggregation.manifest import HandoffTerms
from ...ranks.orders import KV_POOL
from ...ranks.replica.operations.kinds import Operation
from ...small_engine.decode_scheduler import DecodeScheduler
from ...small_engine.forward_pass import Forward
from ...small_engine.limits import EngineLimits
from ...small_engine.prefill_scheduler import PrefillScheduler
from ...small_engine.scheduler import Scheduler
from ..checkers.checkers import DeadlineChecker, ReplicaChecker, TreeChecker, check_at_rest
from ..checkers.findings.answers import OtherAnswer
from ..checkers.findings.finding import Finding, Violated
from ..checkers.findings.group import EndedForNoReason
from ..checkers.findings.handoff import LeftBehind
from ..clock import RankClock, VirtualClock
from ..contents import Contents
from ..engine.probing import probe
from ..epoch import Build, begin_epoch
from ..faults import FaultSource
from ..rank.peers import Peers, ServingGroup
from ..rank.serving import Serving
from ..rank.shards import Shards
from ..rank.shared_store import SharedObjects, SharedStore, SharedStores
from .forward import SymbolicForward
from .post import Mailbox, Post
from .world import DECODE, PREFILL, GroupWorld, HandoffWorld

ADDRESS = "prefill:1"
"""Where the group that prefills serves pages."""
_THOROUGH_EVERY = 8
_TREE_EVERY = 3
_IDLE_S = 0.02
_STUCK_AFTER = 1_000_000
"""Steps without progress after which a scheduler gives up: whether one hangs is judged by time."""


class Group:
    """The ranks of one group. `make_scheduler` says what they do."""

    def __init__(
        self,
        handoff: HandoffWorld,
        world: GroupWorld,
        *,
        clock: VirtualClock,
        shared: SharedObjects,
        meanings: dict[tuple[str, bytes], int],
        contents: Contents,
        namespaces: Mapping[str, str],
        post: Post,
        build: Build,
        faults: Counter[str],
    ) -> None:
        self.world = world
        self.is_alive = True
        self.departures: list[Departures] = []
        self.arrivals: list[Arrivals] = []
        self._handoff = handoff
        self._clock = clock
        self._post = post
        self._random: Random = world.stream("steps")
        self._findings: list[Finding] = []
        self._said: list[list[str]] = [[] for _ in range(world.ranks)]
        layouts = handoff.layouts
        self._shards = [Shards(layouts, rank, world.ranks) for rank in range(world.ranks)]
        stores = [SharedStore(meanings, shards, shared) for shards in self._shards]
        flipped = handoff.troubles.flipped_rank if world.role == PREFILL else None
        if flipped is not None:
            stores[flipped].flips = True
        self.epoch = begin_epoch(
            world,
            1,
            clock=clock,
            clocks=[RankClock(clock, ahead_ms) for ahead_ms in world.faults.skews_ms],
            stores=[SharedStores(store) for store in stores],
            faults=FaultSource(world.faults, world.stream("faults"), faults),
            find=self._findings.append,
            build=build,
        )
        self.caches = [each for each in self.epoch.caches if isinstance(each, Cache)]
        self.serving = self._serve(flipped)
        self.read_from(None)
        post.mailboxes[world.role] = Mailbox(clock, world.stream("mailbox"), self.epoch.inboxes)
        self._trees = TreeChecker(contents, world.config)
        self._replicas = ReplicaChecker(self.epoch.caches)
        step_us_max = sum(
            each.whole_step_us_max + int(each.ranks * _IDLE_S * 1_000_000)
            for each in (handoff.prefill, handoff.decode)
        )
        self._deadlines = DeadlineChecker(world.config, step_us_max=2 * step_us_max, still_us=0)
        self.schedulers = [
            self._make_scheduler(rank, cache, SymbolicForward(cache, memory, contents, namespaces))
            for rank, (cache, memory) in enumerate(
                zip(self.caches, self.epoch.memories, strict=True)
            )
        ]

    def read_from(self, other: ServingGroup | None) -> None:
        """Read what another group serves."""
        for executor, shards in zip(self.epoch.executors, self._shards, strict=True):
            executor.connect = partial(_connect, other, shards)

    @property
    def in_system(self) -> int:
        """How many requests the group has."""
        return self.schedulers[0].in_system

    @property
    def in_flight(self) -> Mapping[int, Operation]:
        """The operations that have not ended."""
        return self.caches[0].inspection.in_flight

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests, has heard all messages, and nothing is in flight."""
        heard = all(inbox.waiting == 0 for inbox in self.epoch.inboxes)
        return not self.in_system and heard and self.caches[0].inspection.idle

    def abort(self, name: str) -> int:
        """Abort a request on every rank; return how many there are less."""
        before = self.in_system
        for scheduler in self.schedulers:
            scheduler.abort(name)
        self._compare_said()
        return before - self.in_system

    def die(self) -> None:
        """End with all processes; nothing of it happens any more, and nobody reaches it."""
        self.is_alive = False
        for executor in self.epoch.executors:
            executor.close()
        self._post.mailboxes.pop(self.world.role, None)

    def step(self) -> bool:
        """Take a step on every rank, and check everything; say whether a request has moved."""
        half_us = self.world.step_us_max // 2
        moved = [scheduler.turn() for scheduler in self.schedulers]
        if len(set(moved)) > 1:
            other = moved.index(not moved[0])
            answers = [
                "something moves" if each else "nothing moves" for each in (moved[0], moved[other])
            ]
            raise Violated(OtherAnswer("a turn", answers[0], other, answers[1]))
        self._compare_said()
        self._raise_findings()
        cluster = self.epoch.cluster
        errors = cluster.begin_step(self._random.randrange(200, half_us))
        errors = cluster.end_step(idle_s=0.0 if moved[0] or any(errors) else _IDLE_S)
        self._clock.advance(self._random.randrange(half_us))
        self._raise_findings()
        for rank, error in enumerate(errors):
            if error is not None:
                name = type(error).__name__
                raise Violated(EndedForNoReason(rank, name, str(error), None, None))
        self._check()
        return moved[0]

    def check_rest(self) -> None:
        """Raise unless nothing is left of all the requests that are over."""
        check_at_rest(
            self.epoch.caches[0],
            self.epoch.memories,
            [executor.restless() for executor in self.epoch.executors],
        )
        self._trees.check(self.epoch.caches[0], self.epoch.memories)
        self._raise_findings()
        left = [each.id for each in self.caches[0].inspection.requests]
        if left:
            raise Violated(LeftBehind(self.world.role, f"the requests {', '.join(left)}"))

    def has_room(self) -> bool:
        """Say whether all that there is can be had at once, but for what hangs for ever."""
        return bool(self.in_flight) or probe(self.caches, self.world)

    def _check(self) -> None:
        steps = self.epoch.cluster.steps
        self._replicas.check(steps, thorough=steps % _THOROUGH_EVERY == 0)
        self._deadlines.check(self.caches[0], self._clock.now_us)
        if steps % _TREE_EVERY == 0:
            self._trees.check(self.caches[0], self.epoch.memories)

    def _raise_findings(self) -> None:
        if self._findings:
            raise Violated(self._findings[0])

    def _serve(self, flipped: int | None) -> ServingGroup:
        servers: dict[str, Serving] = {}
        for executor, shards in zip(self.epoch.executors, self._shards, strict=True):
            executor.address = ADDRESS
            executor.serving.shards, executor.serving.strangers = shards, 0
            for pool in self._handoff.layouts:
                servers[shards.own(pool).shard] = executor.serving
        serving = ServingGroup(servers, self._shards)
        if flipped is not None:
            serving.flips = self._shards[flipped].own(KV_POOL).shard
        return serving

    def _make_scheduler(self, rank: int, cache: Cache, forward: Forward) -> Scheduler:
        handoff, config = self._handoff, self.world.config
        limits = EngineLimits(
            concurrency=self.world.requests_max,
            page_tokens=config.layout.page_tokens,
            device_pages=config.device_pages,
            prefill_tokens=handoff.chunk_tokens,
            output_tokens_max=0,
            idle_steps_max=_STUCK_AFTER,
        )
        send = partial(self._send, rank)
        terms = terms_of(self.world)
        if self.world.role == DECODE:
            arrivals = Arrivals(
                cache, terms, send, patience_s=handoff.patience_s, early=EarlyLoads(cache)
            )
            self.arrivals.append(arrivals)
            return DecodeScheduler(cache, arrivals, limits, forward=forward)
        departures = Departures(cache, terms, send, directly=handoff.directly, ttl_s=handoff.ttl_s)
        self.departures.append(departures)
        return PrefillScheduler(cache, departures, limits, forward=forward)

    def _send(self, rank: int, to: str, message: Control) -> None:
        """Note what a rank sends, which all of them must; the first one really does."""
        self._said[rank].append(f"{to}: {message}")
        if rank == 0:
            self._post.send(to, message)

    def _compare_said(self) -> None:
        for rank, said in enumerate(self._said):
            if said != self._said[0]:
                raise Violated(OtherAnswer("what is sent", str(self._said[0]), rank, str(said)))
        for said in self._said:
            said.clear()


def terms_of(world: GroupWorld) -> HandoffTerms:
    """Return what the other group of a handoff must have in common with this one."""
    config = world.config
    return HandoffTerms.of(
        Namespace(
            model=config.model,
            weights_version=config.weights_version,
            layouts=pool_layouts(config),
        )
    )


def _connect(other: ServingGroup | None, shards: Shards, source: str) -> Peers:
    """Return the group that serves pages at `source`; nobody does at any other address."""
    if other is not None and source == f"peer://{ADDRESS}":
        return Peers(other, shards)
    nobody = ServingGroup({}, [shards])
    nobody.is_gone = True
    return Peers(nobody, shards)
