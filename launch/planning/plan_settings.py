"""Options of `lockstep plan` and `lockstep size`: the trace, the model, and the sizes to try."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Annotated, Any, Final, TypedDict

from cyclopts import Parameter
from cyclopts.validators import Number

from ...errors import ConfigError
from ...ranks.protocol.eviction_policies import known_policies
from ..cli.options import AT_LEAST_1
from ..cli.replay_settings import Requests
from ..replay.report import HitTokens
from .published import PUBLISHED

FIFO: Final = "fifo"
"""Name of the FIFO policy. A reference cache with a single tier can use this policy; a replica cannot.
"""
_POINTS_MAX: Final = 10_000
_USUAL_HOST_GIB: Final = (0.0, 128.0, 512.0, 2048.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The model to plan for, its TP size and its KV element type."""

    model: Annotated[
        str,
        Parameter(
            help="A model's config.json, its directory, or one known by name:"
            f" {', '.join(PUBLISHED)}.",
            metavar="CONFIG",
        ),
    ] = "llama"
    tp: Annotated[int, AT_LEAST_1, Parameter(help="TP size of the model.")] = 1
    dtype: Annotated[str, Parameter(help="Element type of the KV.")] = "bfloat16"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(ModelChoice):
    """The settings that are equal for all cache sizes of a plan."""

    trace: Annotated[str | None, Parameter(parse=False)] = None
    """The trace's path; None for the built-in workload."""
    requests: Annotated[Requests, Parameter(show_default="all")] = None
    """Use only the first N requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One cache size of a sweep: sizes of the tiers, page size and eviction policy."""

    device_gib: float
    """GiB of memory for KV on each rank's device."""
    host_gib: float
    """GiB of host memory for KV on each rank."""
    storage_gib: float = 0.0
    """GiB of store for all ranks together; 0 means no store, and inf means no limit."""
    page_tokens: int = 64
    policy: str = "lru"


def _list_of(kind: Callable[[str], object], wanted: str) -> Parameter:
    """Return the cyclopts parameter for an option with comma-separated values."""

    def convert(_hint: object, tokens: Sequence[Any]) -> tuple[object, ...]:
        text = str(tokens[0].value)
        try:
            return tuple(dict.fromkeys(kind(each.strip()) for each in text.split(",")))
        except ValueError as error:
            raise ValueError(f"{text!r} is not {wanted}") from error

    return Parameter(converter=convert, n_tokens=1, metavar="A,B,..")


def _share(_hint: object, tokens: Sequence[Any]) -> float:
    """Convert an option value such as 0.3 or 30% to a ratio in (0, 1]."""
    text = str(tokens[0].value)
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 < share <= 1:
        raise ValueError(f"{text!r} is not a share such as 0.3 or 30%")
    return share


def policies() -> list[str]:
    """Return the names of the eviction policies that a plan can use."""
    return [*known_policies(), FIFO]


def _check_policies(_hint: object, names: Sequence[str]) -> None:
    for name in names:
        if name not in policies():
            raise ConfigError(f"--policy is {name!r}, must be one of: {', '.join(policies())}")


_GIB_MAX: Final = 1 << 30
_GIB: Final = _list_of(float, "numbers with commas, such as 20,40")
_Gib = Annotated[tuple[float, ...], _GIB, Parameter(validator=Number(gte=0, lte=_GIB_MAX))]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The sizes to try, in all combinations; or the hit ratio to reach."""

    device_gib: Annotated[_Gib, Parameter(show_default="40")] = (40.0,)
    """KV memory of each rank's device."""
    host_gib: Annotated[_Gib | None, Parameter(show_default="0,128,512,2048")] = None
    """Host memory of each rank; 0 for none."""
    storage_gib: Annotated[
        tuple[float, ...], _GIB, Parameter(validator=Number(gte=0), show_default="0")
    ] = (0.0,)
    """Store size of all ranks together; 0: no store, inf: unbounded."""
    page_tokens: Annotated[
        tuple[int, ...],
        _list_of(int, "whole numbers with commas, such as 16,64"),
        Parameter(validator=Number(gte=1, lte=1 << 20), show_default="64"),
    ] = (64,)
    """Tokens per page."""
    policy: Annotated[
        tuple[str, ...],
        _list_of(str, "words with commas"),
        Parameter(show_default="lru", validator=_check_policies),
    ] = ("lru",)
    """Eviction policy: lru, lfu, slru or priority; or fifo, for comparison."""
    goal: Annotated[
        float | None, Parameter(converter=_share, metavar="SHARE", show_default="none")
    ] = None
    """Search for the least host memory that hits this share of all prompt tokens: 0.3 or 30%."""

    def sizes(self) -> list[Size]:
        """Return all combinations of the sizes.

        Raises `ConfigError` if there are too many combinations, or if a hit ratio is to be reached and
        an option has several values.
        """
        if self.goal is not None and self.host_gib is not None:
            raise ConfigError("--goal searches for the host memory; leave out --host-gib")
        host = (0.0,) if self.goal is not None else self.host_gib or _USUAL_HOST_GIB
        lists = (self.policy, self.page_tokens, self.device_gib, host, self.storage_gib)
        count = prod(map(len, lists))
        if count > _POINTS_MAX:
            raise ConfigError(
                f"the sweep has {count:,} points, must be {_POINTS_MAX:,} at most; give fewer values"
            )
        if self.goal is not None and count > 1:
            raise ConfigError(
                "--goal searches for the host memory only; give one value for each other size"
            )
        return [
            Size(device_gib=a, host_gib=b, storage_gib=c, page_tokens=tokens, policy=policy)
            for policy, tokens, a, b, c in product(*lists)
        ]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSettings(ModelChoice):
    """The tokens to cache and the memory of the tiers: the options of `lockstep size`."""

    tokens: Annotated[float, Parameter(validator=Number(gte=0, lt=inf))] = 1e6
    """Tokens to cache, for example 2e6."""
    page_tokens: Annotated[
        int | None,
        Parameter(validator=Number(gte=1, lte=1 << 20), show_default="the advised size"),
    ] = None
    """Tokens per page."""
    device_gib: Annotated[float, Parameter(validator=Number(gte=0, lte=_GIB_MAX))] = 40.0
    """KV memory of each rank's device (L1)."""
    host_gib: Annotated[float, Parameter(validator=Number(gte=0, lte=_GIB_MAX))] = 256.0
    """Host memory of each rank (L2)."""
    storage_gib: Annotated[float, Parameter(validator=Number(gte=0, lte=_GIB_MAX))] = 4096.0
    """Store size (L3) of all ranks together."""


class MovedGib(TypedDict):
    """GiB that were moved between tiers, summed over all ranks."""

    l1_to_l2: float
    l2_to_l1: float
    l2_to_l3: float
    l3_to_l2: float


class PlanPoint(TypedDict):
    """The result of evaluating one cache size of a sweep."""

    device_gib: float
    host_gib: float
    storage_gib: float | None
    """Store size of all ranks together in GiB; null for an unbounded store."""
    page_tokens: int
    policy: str
    hit_ratio: float
    """Share of prompt tokens that hit in the cache."""
    ideal_ratio: float
    """Share of prompt tokens that would hit in a cache without a limit."""
    belady_ratio: float
    """Share of prompt tokens that would hit with optimal (Belady) evictions, in one tier as large
    as all tiers together."""
    compute_saved: float
    """Share of the prompts' FLOPs that are not computed because of hits."""
    hit_tokens: HitTokens
    moved_gib: MovedGib
    device_pages: int
    host_pages: int
    too_long: int
    """Requests that do not fit the device. All their tokens count as computed, and no page is cached.
    """
