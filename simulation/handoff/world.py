"""What the seed of a schedule of two groups decides before anything happens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from ...coordinator.stop_policy import StopPolicy
from ...page_format.page_layout import Column, PageLayout
from ...ranks.agreed_pools import pool_layouts
from ...ranks.config import (
    Bounds,
    CacheConfig,
    ComponentConfig,
    SlidingWindow,
    WritePolicy,
)
from ...ranks.orders import KV_POOL
from ...ranks.outside import Peers
from ..models import MODEL_PROFILES, draw_components
from ..world import REPLICA, World, draw_timeouts
from .faults import HANDOFF_FAULTS, HandoffFault, HandoffTroubles, draw_troubles, mishaps_of

TP_SIZES = (1, 2, 4, 8)
HEADS = 8
"""So many that ranks of each of these sizes can divide them."""
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWorld(World):
    """One of the two groups."""

    role: str
    pair: str

    def stream(self, name: str) -> Random:
        """See `World`."""
        return Random(f"{self.seed}/handoff/{self.fault_profile}/{self.pair}/{self.role}/{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffWorld:
    """Two groups, and what one hands over to the other."""

    seed: int
    prefill: GroupWorld
    decode: GroupWorld
    troubles: HandoffTroubles
    directly: bool
    """Whether pages go from host to host; otherwise by the store."""
    chunk_tokens: int
    requests: int
    arrivals_us: int
    """Over how long the requests come."""
    output_tokens_max: int
    patience_s: float
    ttl_s: float

    @property
    def faults(self) -> str:
        """The trouble that was asked for."""
        return self.prefill.fault_profile

    @property
    def pair(self) -> str:
        """The TP sizes of both groups."""
        return self.prefill.pair

    @property
    def layouts(self) -> dict[str, PageLayout]:
        """The layout of each pool, by name."""
        return dict(pool_layouts(self.prefill.config))

    def stream(self, name: str) -> Random:
        """Return a random stream of what is outside of both groups."""
        return Random(f"{self.seed}/handoff/{self.faults}/{self.pair}/{name}")

    @property
    def replay(self) -> str:
        """The command that runs this schedule again."""
        return (
            f"lockstep simulate-handoff --seeds {self.seed}:{self.seed + 1}"
            f" --prefill-ranks {self.prefill.ranks} --decode-ranks {self.decode.ranks}"
            f" --profile {self.prefill.profile} --faults {self.faults}"
            f" --depth {self.prefill.depth}"
        )


def draw_handoff_world(
    seed: int,
    *,
    prefill_ranks: int | None = None,
    decode_ranks: int | None = None,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int | None = None,
) -> HandoffWorld:
    """Draw two groups; what is not given is drawn too. Raises `ValueError` for impossible names."""
    _check(prefill_ranks, decode_ranks, profile, faults)
    sizes = Random(f"{seed}/handoff/sizes")
    drawn = sizes.choice(TP_SIZES), sizes.choice(TP_SIZES)
    ranks = prefill_ranks or drawn[0], decode_ranks or drawn[1]
    name = sizes.choice(tuple(MODEL_PROFILES))
    profile, depth = profile or name, seed % 2 if depth is None else depth
    pair = f"{ranks[0]}x{ranks[1]}"
    random = Random(f"{seed}/handoff/{faults}/{pair}/world")
    troubles = draw_troubles(random, faults, ranks[0])
    directly = random.random() < 0.5
    if troubles.has(HandoffFault.HALF):
        directly = False
    if troubles.has(HandoffFault.GONE):
        directly = True
    model = _draw_model(random, profile)
    draw = partial(_draw_group, random, model, troubles, directly=directly, pair=pair)
    shared: dict[str, Any] = {"seed": seed, "fault_profile": faults, "depth": depth}
    prefill, decode = draw(PREFILL, ranks[0], shared), draw(DECODE, ranks[1], shared)
    calm = not troubles.kinds
    return HandoffWorld(
        seed=seed,
        prefill=prefill,
        decode=decode,
        troubles=troubles,
        directly=directly,
        chunk_tokens=random.randint(1, 4) * prefill.page_tokens,
        requests=random.randint(3, 8),
        arrivals_us=random.choice((0, 200_000, 1_000_000)),
        output_tokens_max=random.randint(1, 3 * prefill.page_tokens),
        patience_s=20.0 if calm else random.choice((0.5, 2.0)),
        ttl_s=20.0 if calm else random.choice((0.5, 3.0)),
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """What both groups have in common."""

    profile: str
    layout: PageLayout
    components: tuple[ComponentConfig, ...]
    store: str | None
    requests_max: int
    prompt_pages_max: int


def _draw_model(random: Random, profile: str) -> _Model:
    requests_max, prompt_pages_max = random.choice((2, 3, 4)), random.randint(2, 9)
    column = Column(name="kv", layers=1, heads=HEADS, elements=1, dtype="uint8")
    layout = PageLayout(page_tokens=random.choice((1, 2, 3, 4, 4, 4)), columns=(column,))
    components = draw_components(
        random,
        profile,
        page_tokens=layout.page_tokens,
        ranks=HEADS,
        requests_max=requests_max,
        prompt_pages_max=prompt_pages_max,
        tiny=False,
    )
    store = "memory://" if random.random() < 0.3 else None
    return _Model(profile, layout, components, store, requests_max, prompt_pages_max)


def _draw_group(  # noqa: PLR0917 - what one group is drawn from.
    random: Random,
    model: _Model,
    troubles: HandoffTroubles,
    role: str,
    ranks: int,
    shared: Mapping[str, Any],
    *,
    directly: bool,
    pair: str,
) -> GroupWorld:
    small = troubles.has(HandoffFault.SMALL_HOST) and random.random() < 0.7
    calm = not troubles.kinds
    prompt_pages, in_use = model.prompt_pages_max, model.requests_max * (model.prompt_pages_max + 4)
    config = CacheConfig(
        model="simulated",
        layout=model.layout,
        components=_resized(random, model.components, prompt_pages, small=small),
        device_pages=random.choice((prompt_pages + 4, in_use, in_use + 30)),
        host_pages=random.randint(2, 2 * prompt_pages) if small else 3 * in_use,
        store=model.store if directly else "memory://",
        peers=Peers(),
        stop_policy=StopPolicy(base_s=0.2 if calm else random.choice((0.05, 0.2)), cap_s=0.5),
        write_policy=random.choice((WritePolicy.WRITE_THROUGH, *WritePolicy)),
        pipeline_depth=shared["depth"],
        bounds=Bounds(prefetches=32 if calm else random.choice((1, 4, 32))),
        timeouts=draw_timeouts(random, fence_s=0.001),
    )
    return GroupWorld(
        **shared,
        role=role,
        pair=pair,
        ranks=ranks,
        steps=0,
        profile=model.profile,
        l1=REPLICA,
        device_pools={KV_POOL: config.device_pages}
        | {each.pool: each.device_pages for each in config.components},
        config=config,
        faults=mishaps_of(random, troubles, ranks),
        requests_max=model.requests_max,
        arrival_rate=1.0,
        step_us_max=random.choice((6_000, 15_000, 30_000)),
        prompt_pages_max=prompt_pages,
    )


def _resized(
    random: Random, components: Sequence[ComponentConfig], prompt_pages: int, *, small: bool
) -> tuple[ComponentConfig, ...]:
    """Return the components of one group, whose host pools are small or not."""
    resized: list[ComponentConfig] = []
    for each in components:
        if not small:
            host = each.host_pages + 8 * prompt_pages
        elif isinstance(each, SlidingWindow):
            host = random.randint(1, prompt_pages + 1)
        else:
            host = random.randint(1, 3)
        resized.append(replace(each, host_pages=host))
    return tuple(resized)


def _check(
    prefill_ranks: int | None, decode_ranks: int | None, profile: str | None, faults: str
) -> None:
    for ranks in (prefill_ranks, decode_ranks):
        if ranks is not None and ranks not in TP_SIZES:
            raise ValueError(f"a group of {ranks} ranks, must be one of {TP_SIZES}")
    if profile not in (None, *MODEL_PROFILES):
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(MODEL_PROFILES)}")
    if faults not in HANDOFF_FAULTS:
        raise ValueError(f"unknown faults {faults!r}; known: {', '.join(HANDOFF_FAULTS)}")
