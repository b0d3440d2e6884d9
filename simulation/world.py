"""The world of one schedule: settings, sizes and tempo, drawn from the seed before anything happens."""

from dataclasses import dataclass
from random import Random

from ..coordinator.stop_policy import StopPolicy, StopRule
from ..ranks.config import Bounds, CacheConfig, Timeouts
from ..ranks.page_layout import Column, PageLayout
from .faults import PROFILES, FaultPlan, draw_plan

REPLICA, ENGINE, BOTH = "replica", "engine", "both"
L1_CHOICES = (REPLICA, ENGINE, BOTH)
"""Who owns the device pages (L1); the seed decides between both."""

IDLE_S = 0.002
"""How long an engine waits for progress in a step that computes nothing."""

STEPS_MIN = 100
"""A shorter schedule proves little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a schedule's seed has decided before its first step."""

    seed: int
    ranks: int
    steps: int
    profile: str
    depth: int
    l1: str
    """Who owns the device pages: REPLICA or ENGINE."""
    device_pages: int
    """Of each rank, whoever owns them."""
    config: CacheConfig
    faults: FaultPlan
    requests_max: int
    """Requests that the engine has in flight at a time."""
    arrival_rate: float
    """The chance that a request arrives in a step with room for it."""
    step_us_max: int
    """The longest forward pass."""
    prompt_pages_max: int
    """The longest prompt, in pages."""

    @property
    def page_tokens(self) -> int:
        """The tokens of one page."""
        return self.config.layout.page_tokens

    @property
    def whole_step_us_max(self) -> int:
        """The longest step, with all that an engine of its own may wait for in it."""
        waits_s = 0.0
        if self.l1 == ENGINE:
            waits_s = self.ranks * (self.requests_max * self.config.timeouts.fence_s + IDLE_S)
        return 2 * self.step_us_max + int(waits_s * 1_000_000)

    def stream(self, name: str) -> Random:
        """Return a stream of the seed of its own, so that draws of one part never shift another's."""
        return Random(f"{self.seed}/{self.profile}/{self.ranks}/{name}")

    @property
    def replay(self) -> str:
        """The command that runs this schedule again."""
        return (
            f"lockstep simulate --seeds {self.seed}:{self.seed + 1} --ranks {self.ranks} "
            f"--steps {self.steps} --profile {self.profile} --depth {self.depth} --l1 {self.l1}"
        )


def draw_world(
    seed: int, *, ranks: int, steps: int, profile: str, depth: int, l1: str = BOTH
) -> World:
    """Draw the world of one schedule. Raises `ValueError` for a size or name that cannot be."""
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, must be 1 or more")
    if steps < STEPS_MIN:
        raise ValueError(f"steps is {steps}, must be {STEPS_MIN} or more")
    if l1 not in L1_CHOICES:
        raise ValueError(f"unknown owner of L1 {l1!r}; known: {', '.join(L1_CHOICES)}")
    # The owner is drawn from a stream of its own, so that all else is the same for either.
    owner = Random(f"{seed}/{profile}/{ranks}/l1")
    drawn, fence_s = owner.choice((REPLICA, ENGINE)), owner.choice((0.001, 0.006))
    l1 = drawn if l1 == BOTH else l1
    random = Random(f"{seed}/{profile}/{ranks}/world")
    faults = draw_plan(random, profile=profile, ranks=ranks, steps=steps)
    requests_max = random.choice((1, 2, 2, 3, 3, 4, 6, 8))
    prompt_pages_max = random.randint(4, 14)
    device_pages, host_pages = _draw_pools(
        random, requests_max, prompt_pages_max, tiny=faults.tiny_pools
    )
    config = CacheConfig(
        model="simulated",
        layout=PageLayout(
            page_tokens=random.choice((1, 2, 3, 4, 4, 4)),
            columns=(Column(name="kv", layers=1, heads=ranks, elements=1, dtype="uint8"),),
        ),
        device_pages=device_pages if l1 == REPLICA else 0,
        host_pages=host_pages,
        store="memory://" if random.random() < 0.94 else None,
        stop_policy=StopPolicy(
            rule=random.choice(tuple(StopRule)),
            base_s=random.choice((0.02, 0.1)),
            per_ki_token_s=random.choice((0.0, 2.0)),
            cap_s=random.choice((0.08, 0.5)),
        ),
        pipeline_depth=depth,
        bounds=_draw_bounds(random, tiny=faults.tiny_bounds),
        timeouts=Timeouts(
            round_s=0.004,
            lookup_s=random.choice((0.05, 0.3)),
            persist_s=random.choice((0.1, 0.4)),
            copy_s=random.choice((0.04, 0.2)),
            fence_s=fence_s,
            quiesce_s=random.choice((0.03, 0.15)),
            miss_memory_s=random.choice((0.05, 0.5)),
            flush_s=30.0,
        ),
    )
    return World(
        seed=seed,
        ranks=ranks,
        steps=steps,
        profile=profile,
        depth=depth,
        l1=l1,
        device_pages=device_pages,
        config=config,
        faults=faults,
        requests_max=requests_max,
        arrival_rate=random.uniform(0.3, 1.0),
        step_us_max=random.choice((6_000, 15_000, 30_000)),
        prompt_pages_max=prompt_pages_max,
    )


def _draw_pools(random: Random, requests: int, prompt_pages: int, *, tiny: bool) -> tuple[int, int]:
    """Draw the pages of device and host. What is in use by all requests fits a roomy device."""
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


def _draw_bounds(random: Random, *, tiny: bool) -> Bounds:
    if not tiny:
        return Bounds(prefetches=random.choice((8, 32)))
    return Bounds(
        prefetches=random.randint(1, 3),
        prefetches_waiting=random.randint(0, 4),
        prefetch_pages=random.choice((None, 4, 16)),
        persists=random.randint(1, 3),
        persists_waiting=random.randint(0, 4),
        quarantine_pages=random.choice((None, 1, 8)),
        remembered_misses=random.choice((0, 2, 64)),
    )
