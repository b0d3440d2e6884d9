"""The world of one schedule: settings, sizes and speeds, drawn from the seed before the first step."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from msgspec import structs

from ...coordinator.stop_policy import StopPolicy, StopRule
from ...page_format.page_layout import Column, PageLayout
from ...ranks.protocol.config import (
    Bounds,
    CacheConfig,
    ComponentConfig,
    HostCacheConfig,
    RankCacheConfig,
    Recurrent,
    SlidingWindow,
    Timeouts,
)
from ...ranks.protocol.network_config import Peers
from ...ranks.protocol.orders import KV_POOL
from .faults import FAULT_PROFILES, Mishaps, draw_plan
from .models import MODEL_PROFILES, draw_components
from .policies import Policies, draw_policies

REPLICA, ENGINE, BOTH = "replica", "engine", "both"
L1_CHOICES = (REPLICA, ENGINE, BOTH)
"""Possible owners of the device pages (L1); with `both`, the seed decides."""

TP_SIZES = (1, 2, 4, 8)
PAIRS = {f"{p}x{d}": (p, d) for p, d in product(TP_SIZES, TP_SIZES)}
"""TP sizes of producer and consumer, by name, as in `lockstep simulate --pd 2x1`."""
DRAWN = "drawn"
"""The value of `--pd` with which the seed chooses the TP sizes of producer and consumer."""

IDLE_S = 0.002
"""Seconds that an engine may wait for I/O in a step in which it computes nothing."""

STEPS_MIN = 100
"""Minimum number of steps of a schedule, because shorter schedules find little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All settings that are drawn before a schedule's first step."""

    seed: int
    ranks: int
    steps: int
    profile: str
    """Name of the model profile, one of `MODEL_PROFILES`."""
    fault_profile: str
    """Name of the fault profile, one of `FAULT_PROFILES`."""
    depth: int
    l1: str
    """Owner of the device pages: `REPLICA` or `ENGINE`."""
    device_pools: Mapping[str, int]
    """By pool: number of device pages on each rank, whoever owns the device pages."""
    config: RankCacheConfig
    faults: Mishaps
    requests_max: int
    """Maximum number of requests that the engine has in flight."""
    arrival_rate: float
    """Chance that a request arrives in a step in which fewer than `requests_max` are in flight."""
    step_us_max: int
    """Maximum duration of a step's forward pass, in microseconds."""
    prompt_pages_max: int
    """Maximum length of a prompt, in pages."""
    role: str = ""
    """This group's role in a pair, from `Side`; empty for a single group."""
    meanwhile_us: int = 0
    """Maximum time in microseconds that passes between two steps of this group while the other group
    steps."""

    @property
    def page_tokens(self) -> int:
        return self.config.layout.page_tokens

    @property
    def device_pages(self) -> int:
        """Number of full-attention device pages on each rank, whoever owns them."""
        return self.device_pools[KV_POOL]

    @property
    def pools(self) -> dict[str, tuple[int, int]]:
        """By pool: (device pages, host pages) on each rank."""
        sizes = self.config.pool_sizes()
        return {pool: (self.device_pools[pool], host) for pool, (_, host) in sizes.items()}

    @property
    def state_pools(self) -> frozenset[str]:
        """Names of the pools of recurrent states."""
        components = self.config.components
        return frozenset(each.pool for each in components if isinstance(each, Recurrent))

    @property
    def checkpoint_tokens(self) -> int | None:
        """Tokens between two checkpoints of a recurrent state; None in a model without such states."""
        for component in self.config.components:
            if isinstance(component, Recurrent):
                return component.checkpoint_tokens
        return None

    @property
    def whole_step_us_max(self) -> int:
        """Maximum duration of a step in microseconds, including fences and waits for I/O."""
        waits_s = 0.0
        if self.l1 == ENGINE:
            waits_s = self.ranks * (self.requests_max * self.config.timeouts.fence_s + IDLE_S)
        return 2 * self.step_us_max + int(waits_s * 1_000_000) + self.meanwhile_us

    def stream(self, name: str) -> Random:
        """Return a named random stream; draws from one stream do not change those of another."""
        return Random(f"{self.seed}/{self.fault_profile}/{self.role}{self.ranks}/{name}")

    def may_fit(self, cached_tokens: int, reserve_tokens: int) -> bool:
        """Return whether a request's cached prefix and reserved pages fit an empty device."""
        unit = self.page_tokens
        cached = cached_tokens // unit
        wanted = max(cached, -(-reserve_tokens // unit))
        windows = {
            each.pool: -(-each.window_tokens // unit)
            for each in self.config.components
            if isinstance(each, SlidingWindow)
        }
        return wanted <= self.device_pages and all(
            wanted - max(0, cached - window) <= self.pools[pool][0]
            for pool, window in windows.items()
        )

    @property
    def replay(self) -> str:
        """The command that replays this schedule."""
        return (
            f"lockstep simulate --seeds {self.seed}:{self.seed + 1} --ranks {self.ranks} "
            f"--steps {self.steps} --profile {self.profile} --faults {self.fault_profile} "
            f"--depth {self.depth} --l1 {self.l1}"
        )


def _draw_layout(random: Random, heads: int) -> PageLayout:
    column = Column(name="kv", layers=1, heads=heads, elements=1, dtype="uint8")
    return PageLayout(page_tokens=random.choice((1, 2, 3, 4, 4, 4)), columns=(column,))


@dataclass(frozen=True, slots=True)
class Side:
    """Parameters of one of the two groups of a pair, fixed before the group's world is drawn."""

    role: str
    """The group's role. The random draws of the two groups differ by role."""
    heads: int
    """Number of KV heads, divisible by the TP sizes of both groups; 0 means one head per rank."""
    prompt_pages: int
    """Maximum length of a prompt, in pages; 0 means that the seed decides."""


_ALONE = Side("", 0, 0)


def draw_world(
    seed: int,
    *,
    ranks: int,
    steps: int,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int,
    l1: str = BOTH,
    side: Side = _ALONE,
) -> World:
    """Draw the world of one schedule. Raises `ValueError` for an invalid size or name."""
    _check(ranks=ranks, steps=steps, profile=profile, faults=faults, l1=l1)
    scope = f"{seed}/{faults}/{side.role}{ranks}"
    # Draw owner and model from separate random streams, so that other draws do not depend on these two
    # choices.
    owner, model = Random(f"{scope}/l1"), Random(f"{scope}/model")
    l1, profile = _choose(owner, model, l1, profile)
    random = Random(f"{scope}/world")
    plan = draw_plan(random, Random(f"{scope}/tokens"), profile=faults, ranks=ranks, steps=steps)
    requests_max = random.choice((1, 2, 2, 3, 3, 4, 6, 8))
    prompt_pages_max = side.prompt_pages or random.randint(4, 14)
    device_pages, host_pages = _draw_pools(
        random, requests_max, prompt_pages_max, tiny=plan.tiny_pools
    )
    policies = draw_policies(Random(f"{scope}/policies"), l1 != REPLICA)
    layout = _draw_layout(random, side.heads or ranks)
    components = draw_components(
        model,
        profile,
        page_tokens=layout.page_tokens,
        heads=side.heads or ranks,
        requests_max=requests_max,
        prompt_pages_max=prompt_pages_max,
        tiny=plan.tiny_pools,
    )
    config = _config(
        l1,
        components,
        device_pages,
        policies,
        model="simulated",
        layout=layout,
        host_pages=host_pages,
        store="memory://" if random.random() < 0.94 else None,
        peers=Peers(),
        stop_policy=_draw_stop_policy(random),
        pipeline_depth=depth,
        bounds=_draw_bounds(random, policies.pinned_pages, tiny=plan.tiny_bounds),
        timeouts=draw_timeouts(random, fence_s=owner.choice((0.001, 0.006))),
    )
    return World(
        seed=seed,
        ranks=ranks,
        steps=steps,
        profile=profile,
        fault_profile=faults,
        depth=depth,
        l1=l1,
        device_pools={KV_POOL: device_pages}
        | {each.pool: each.device_pages for each in components},
        config=config,
        faults=plan,
        requests_max=requests_max,
        arrival_rate=random.uniform(0.3, 1.0),
        step_us_max=random.choice((6_000, 15_000, 30_000)),
        prompt_pages_max=prompt_pages_max,
        role=side.role,
    )


def _config(
    l1: str,
    components: tuple[ComponentConfig, ...],
    device_pages: int,
    policies: Policies,
    **others: Any,
) -> RankCacheConfig:
    """Return a `HostCacheConfig` if the engine owns the device pages, else a `CacheConfig`."""
    shared: dict[str, Any] = {**others, "eviction": policies.eviction, "limits": policies.limits}
    if l1 != REPLICA:
        lent = tuple(structs.replace(each, device_pages=0) for each in components)
        return HostCacheConfig(components=lent, **shared)
    return CacheConfig(
        components=components,
        device_pages=device_pages,
        write_policy=policies.write_policy,
        selective_hits=policies.selective_hits,
        **shared,
    )


def _choose(owner: Random, model: Random, l1: str, profile: str | None) -> tuple[str, str]:
    """Return (L1 owner, model profile): those given, or else drawn ones."""
    drawn_l1, drawn_profile = owner.choice((REPLICA, ENGINE)), model.choice(tuple(MODEL_PROFILES))
    return drawn_l1 if l1 == BOTH else l1, profile or drawn_profile


def _check(*, ranks: int, steps: int, profile: str | None, faults: str, l1: str) -> None:
    """Raise `ValueError` for the first invalid setting of a schedule."""
    if profile not in (None, *MODEL_PROFILES):
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(MODEL_PROFILES)}")
    if faults not in FAULT_PROFILES:
        raise ValueError(f"unknown faults {faults!r}; known: {', '.join(FAULT_PROFILES)}")
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, must be 1 or more")
    if steps < STEPS_MIN:
        raise ValueError(f"steps is {steps}, must be {STEPS_MIN} or more")
    if l1 not in L1_CHOICES:
        raise ValueError(f"unknown owner of L1 {l1!r}; known: {', '.join(L1_CHOICES)}")


def _draw_stop_policy(random: Random) -> StopPolicy:
    return StopPolicy(
        rule=random.choice(tuple(StopRule)),
        base_s=random.choice((0.02, 0.1)),
        per_ki_token_s=random.choice((0.0, 2.0)),
        cap_s=random.choice((0.08, 0.5)),
    )


def draw_timeouts(random: Random, *, fence_s: float) -> Timeouts:
    """Draw timeouts so short that they can expire within a schedule."""
    return Timeouts(
        round_s=0.004,
        lookup_s=random.choice((0.05, 0.3)),
        persist_s=random.choice((0.1, 0.4)),
        copy_s=random.choice((0.04, 0.2)),
        fence_s=fence_s,
        quiesce_s=random.choice((0.03, 0.15)),
        miss_memory_s=(miss_memory_s := random.choice((0.05, 0.5))),
        absence_memory_s=miss_memory_s / 2,
        flush_s=30.0,
        open_s=0.3,
    )


def _draw_pools(random: Random, requests: int, prompt_pages: int, *, tiny: bool) -> tuple[int, int]:
    """Draw (device, host) numbers of full-attention pages.

    Unless `tiny`, all pages of all requests in flight often fit the device.
    """
    in_use = requests * (prompt_pages + 4)
    if tiny:
        host_pages = random.choice(
            (
                random.randint(2, prompt_pages),
                random.randint(prompt_pages, prompt_pages * 3),
                100,
                100,
            )
        )
        return random.randint(prompt_pages, in_use // 3 + prompt_pages), host_pages
    match random.randrange(4):
        case 0:
            device_pages = in_use + 60
            return device_pages, device_pages + random.randint(0, 60)
        case 1:
            return in_use, 100
        case 2:
            return in_use, in_use // 2 + prompt_pages
        case _:
            return prompt_pages + 4 + in_use // 2, in_use // 2 + prompt_pages


def _draw_bounds(random: Random, pinned_pages: int | None, *, tiny: bool) -> Bounds:
    if not tiny:
        return Bounds(prefetches=random.choice((8, 32)), pinned_pages=pinned_pages)
    return Bounds(
        pinned_pages=pinned_pages,
        prefetches=random.randint(1, 3),
        prefetches_waiting=random.randint(0, 4),
        prefetch_pages=random.choice((None, 4, 16)),
        persists=random.randint(1, 3),
        persists_waiting=random.randint(0, 4),
        quarantine_pages=random.choice((None, 1, 8)),
        remembered_misses=random.choice((0, 2, 64)),
    )
