"""Simulation of two groups: a producer computes prompts and serves their pages to a consumer.

Each group is a separate simulation with its own ranks, stores, faults and checkers. The groups share
virtual time, so that all planned events have one order. They also share the meaning of page keys, and
the numbers that represent page contents. The consumer reads pages from the host memory of the
producer's ranks by object name, whatever the TP sizes are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from msgspec import structs

from ..page_format.page_layout import ShardPlace
from ..ranks.protocol.agreed_pools import pool_layouts
from ..ranks.protocol.config import ComponentConfig, SlidingWindow
from .engine.group_handoff import GroupHandoff
from .rank.epoch import SOUND_BUILD, Build, Epoch
from .rank.simulated_peers import ServingGroup, SimulatedPeers
from .result import ScheduleResult
from .schedule import Schedule, Surroundings
from .world.clock import VirtualClock
from .world.faults import FAULT_PROFILES, Mishap
from .world.world import BOTH, DRAWN, PAIRS, REPLICA, TP_SIZES, Side, World, draw_world

_ADDRESS = "producer:1"
_TURNS_APART = 0.3
"""The chance that only one of the two groups takes a step, instead of both."""
_MEANWHILE = 2
"""The number of steps that one group may take, on average, between two steps of the other group."""


@dataclass(frozen=True, slots=True)
class PairWorld:
    """The worlds (settings and faults) of a producer and a consumer that serve one model."""

    pd: str
    producer: World
    consumer: World
    replay: str
    """The command that replays the schedule of this pair."""


def draw_pair(
    seed: int,
    *,
    pd: str = DRAWN,
    steps: int = 100,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int = 1,
    l1: str = BOTH,
) -> PairWorld:
    """Draw the worlds of two groups. Raises `ValueError` for an invalid name or size."""
    if pd != DRAWN and pd not in PAIRS:
        raise ValueError(f"unknown pair {pd!r}; known: {DRAWN}, {', '.join(PAIRS)}")
    random = Random(f"{seed}/{faults}/pair")
    drawn, prompt_pages = random.choice(list(PAIRS)), random.randint(4, 14)
    pd = drawn if pd == DRAWN else pd
    draw = partial(draw_world, seed, steps=steps, faults=faults, depth=depth, l1=l1)
    sides = [
        Side(f"{pd}/{role}/", max(TP_SIZES), prompt_pages) for role in ("producer", "consumer")
    ]
    one = draw(ranks=PAIRS[pd][0], profile=profile, side=sides[0])
    other = draw(ranks=PAIRS[pd][1], profile=one.profile, side=sides[1])
    one, other = _with_spoiled_saves(one), _with_spoiled_saves(_with_model_of(one, other))
    replay = (
        f"lockstep simulate --pd {pd} --seeds {seed}:{seed + 1} --steps {steps}"
        f" --profile {one.profile} --faults {faults} --depth {depth} --l1 {l1}"
    )
    return PairWorld(
        pd,
        replace(one, meanwhile_us=_MEANWHILE * other.whole_step_us_max),
        replace(other, meanwhile_us=_MEANWHILE * one.whole_step_us_max),
        replay,
    )


def _with_model_of(one: World, other: World) -> World:
    """Return a copy of the world `other` with the model of `one`, and with its own pool sizes."""
    config, pools = other.config, dict(other.device_pools)
    components: list[ComponentConfig] = []
    for served, drawn in zip(one.config.components, config.components, strict=True):
        if isinstance(served, SlidingWindow):
            least = served.window_tokens // one.page_tokens + 2
            pools[served.pool] = max(pools[served.pool], least)
        owned = pools[served.pool] if other.l1 == REPLICA else 0
        components.append(structs.replace(served, device_pages=owned, host_pages=drawn.host_pages))
    config = replace(config, layout=one.config.layout, components=tuple(components))
    return replace(other, config=config, device_pools=pools)


def _with_spoiled_saves(world: World) -> World:
    random, faults = world.stream("saves"), world.faults
    possible = Mishap.SPOILED_SAVE in FAULT_PROFILES[world.fault_profile].faults
    if not possible or not faults.rates or random.random() < 0.5:
        return world
    rates = {**faults.rates, Mishap.SPOILED_SAVE: random.uniform(0.02, 0.2)}
    return replace(world, faults=replace(faults, rates=rates))


class PairSchedule:
    """Runs one schedule of a pair of groups: takes steps of both groups in common virtual time."""

    def __init__(
        self, world: PairWorld, *, record: bool = False, build: Build = SOUND_BUILD
    ) -> None:
        one, other = world.producer, world.consumer
        self.world = world
        self.result = ScheduleResult(
            seed=one.seed, l1=f"{one.l1} to {other.l1}", profile=one.profile, pd=world.pd
        )
        around = Surroundings(self.result)
        clock, beside = VirtualClock(), VirtualClock()
        clock.beside, beside.beside = beside, clock
        self._random = one.stream("turns")
        handover = GroupHandoff(one.stream("handover"), one.page_tokens, self.result.coverage)
        group = partial(_Group, around=around, record=record, build=build)
        self.producer = group(one, clock=clock, gives=handover)
        self.consumer = group(other, clock=beside, takes=handover, source=self.producer)

    def run(self) -> ScheduleResult:
        """Run both groups until their schedules end or a rule is violated, and return the result."""
        result, groups = self.result, [self.producer.steps(), self.consumer.steps()]
        for each in self._turns(groups):
            if next(each, self) is self:
                groups.remove(each)
            if result.violation is not None:
                result.violation = replace(result.violation, replay=self.world.replay)
                break
        return result

    def _turns(self, groups: list[Iterator[None]]) -> Iterator[Iterator[None]]:
        """Yield, step by step, the group that takes a step, until both groups are done."""
        while groups:
            drawn = self._random.sample(groups, len(groups))
            yield from drawn[:1] if self._random.random() < _TURNS_APART else drawn


class _Group(Schedule):
    """One of the two groups of a pair."""

    def __init__(
        self,
        world: World,
        *,
        clock: VirtualClock,
        around: Surroundings,
        record: bool,
        build: Build,
        gives: GroupHandoff | None = None,
        takes: GroupHandoff | None = None,
        source: "_Group | None" = None,
    ) -> None:
        """Create one group of a pair: a producer if `gives` is set, a consumer if `takes` is set.

        A producer puts handed-over requests into the queue `gives`. A consumer takes requests from the
        queue `takes`, and reads their pages from the group `source`.
        """
        self._source = source
        self._layouts = dict(pool_layouts(world.config))
        super().__init__(world, record=record, build=build, clock=clock, around=around)
        self._workload.gives, self._workload.takes = gives, takes

    def _begin_epoch(self) -> Epoch:
        epoch, source = super()._begin_epoch(), self._source
        for rank, executor in enumerate(epoch.executors):
            if source is None:
                executor.address = _ADDRESS
            else:
                executor.connect = partial(source.connect, ShardPlace.of(rank, self.world.ranks))
        self._serving = ServingGroup(self._layouts, [each.serving for each in epoch.executors])
        return epoch

    def connect(self, place: ShardPlace, source: str) -> SimulatedPeers:
        """Return a `PageSource` with this producer's pages for the consumer's shard `place`."""
        del source
        return SimulatedPeers(self._serving, place, self.result.coverage)

    def _end(self, *, last: bool = False) -> bool:
        # The other group takes no steps while this group is drained, so its clock must not advance.
        # Detach it meanwhile.
        beside, self._clock.beside = self._clock.beside, None
        try:
            return super()._end(last=last)
        finally:
            self._clock.beside = beside


def run_pair(
    seed: int,
    *,
    pd: str = DRAWN,
    steps: int = 100,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int = 1,
    l1: str = BOTH,
    build: Build = SOUND_BUILD,
) -> ScheduleResult:
    """Run the schedule of one seed for a pair of groups; equal arguments give equal runs."""
    world = draw_pair(seed, pd=pd, steps=steps, profile=profile, faults=faults, depth=depth, l1=l1)
    return PairSchedule(world, build=build).run()
