"""What is to be planned: a trace, a model, and the sizes to try; the options of `plan` and `size`."""

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
from ..cli.settings import Requests
from ..replay.report import HitTokens
from .published import PUBLISHED

FIFO: Final = "fifo"
"""Not a policy of the replica's: an oracle with all the memory in one tier, to compare with others."""
_POINTS_MAX: Final = 10_000
_USUAL_HOST_GIB: Final = (0.0, 128.0, 512.0, 2048.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model, and how it is divided."""

    model: Annotated[
        str,
        Parameter(
            help="A model's config.json, its directory, or one known by name:"
            f" {', '.join(PUBLISHED)}.",
            metavar="CONFIG",
        ),
    ] = "llama"
    tp: Annotated[int, AT_LEAST_1, Parameter(help="Ranks that divide the model (TP size).")] = 1
    dtype: Annotated[str, Parameter(help="Element type of the KV.")] = "bfloat16"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(ModelChoice):
    """What all points have in common."""

    trace: Annotated[str | None, Parameter(parse=False)] = None
    """None stands for the built-in workload."""
    requests: Annotated[Requests, Parameter(show_default="all")] = None
    """Take only the first so many requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One point of a sweep."""

    device_gib: float
    """KV memory of each rank's device."""
    host_gib: float
    """Host memory of each rank."""
    storage_gib: float = 0.0
    """What the store may keep, of all ranks together; 0 stands for no store, inf for no bound."""
    page_tokens: int = 64
    policy: str = "lru"


def _list_of(kind: Callable[[str], object], wanted: str) -> Parameter:
    """Return an option that takes several values, with commas between them."""

    def convert(_hint: object, tokens: Sequence[Any]) -> tuple[object, ...]:
        text = str(tokens[0].value)
        try:
            return tuple(dict.fromkeys(kind(each.strip()) for each in text.split(",")))
        except ValueError as error:
            raise ValueError(f"{text!r} is not {wanted}") from error

    return Parameter(converter=convert, n_tokens=1, metavar="A,B,..")


def _share(_hint: object, tokens: Sequence[Any]) -> float:
    """Return a share, written as 0.3 or 30%."""
    text = str(tokens[0].value)
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 < share <= 1:
        raise ValueError(f"{text!r} is no share such as 0.3 or 30%")
    return share


def policies() -> list[str]:
    """Return the names of the policies that can be planned with."""
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
    """The sizes to try, each with each; or the share of hits that is to be reached."""

    device_gib: Annotated[_Gib, Parameter(show_default="40")] = (40.0,)
    """KV memory of each rank's device."""
    host_gib: Annotated[_Gib | None, Parameter(show_default="0,128,512,2048")] = None
    """Host memory of each rank; 0 for none."""
    storage_gib: Annotated[
        tuple[float, ...], _GIB, Parameter(validator=Number(gte=0), show_default="0")
    ] = (0.0,)
    """What the store keeps, of all ranks together; 0 for no store, inf for no bound."""
    page_tokens: Annotated[
        tuple[int, ...],
        _list_of(int, "whole numbers with commas, such as 16,64"),
        Parameter(validator=Number(gte=1, lte=1 << 20), show_default="64"),
    ] = (64,)
    """Tokens of a page."""
    policy: Annotated[
        tuple[str, ...],
        _list_of(str, "words with commas"),
        Parameter(show_default="lru", validator=_check_policies),
    ] = ("lru",)
    """Which page leaves first: lru, lfu, slru, priority; or fifo, to compare."""
    goal: Annotated[
        float | None, Parameter(converter=_share, metavar="SHARE", show_default="none")
    ] = None
    """Look for the least host memory that hits so much of all prompt tokens: 0.3 or 30%."""

    def sizes(self) -> list[Size]:
        """Return every combination. Raises `ConfigError` for those that are too many, or no goal's."""
        if self.goal is not None and self.host_gib is not None:
            raise ConfigError("--goal looks for the host memory; leave out --host-gib")
        host = (0.0,) if self.goal is not None else self.host_gib or _USUAL_HOST_GIB
        lists = (self.policy, self.page_tokens, self.device_gib, host, self.storage_gib)
        count = prod(map(len, lists))
        if count > _POINTS_MAX:
            raise ConfigError(
                f"these are {count:,} points, and a sweep has {_POINTS_MAX:,} at most"
            )
        if self.goal is not None and count > 1:
            raise ConfigError(
                "--goal looks for the host memory beside one of each of the other sizes; give no lists"
            )
        return [
            Size(device_gib=a, host_gib=b, storage_gib=c, page_tokens=tokens, policy=policy)
            for policy, tokens, a, b, c in product(*lists)
        ]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSettings(ModelChoice):
    """Which tokens are to be cached, and in what: the options of `lockstep size`."""

    tokens: Annotated[float, Parameter(validator=Number(gte=0, lt=inf))] = 1e6
    """Tokens that are to be cached, for example 2e6."""
    page_tokens: Annotated[
        int | None,
        Parameter(validator=Number(gte=1, lte=1 << 20), show_default="what is advised"),
    ] = None
    """Tokens of a page."""
    device_gib: Annotated[float, Parameter(validator=Number(gte=0, lte=_GIB_MAX))] = 40.0
    """KV memory of each rank's device (L1)."""
    host_gib: Annotated[float, Parameter(validator=Number(gte=0, lte=_GIB_MAX))] = 256.0
    """Host memory of each rank (L2)."""
    storage_gib: Annotated[float, Parameter(validator=Number(gte=0, lte=_GIB_MAX))] = 4096.0
    """What the store keeps (L3), of all ranks together."""


class MovedGib(TypedDict):
    """What all ranks together moved between tiers."""

    l1_to_l2: float
    l2_to_l1: float
    l2_to_l3: float
    l3_to_l2: float


class Point(TypedDict):
    """What one size comes to."""

    device_gib: float
    host_gib: float
    storage_gib: float | None
    """null stands for a store without a bound."""
    page_tokens: int
    policy: str
    hit_ratio: float
    """Prompt tokens that came from the cache, of all."""
    ideal_ratio: float
    """The same of a cache without bounds."""
    belady_ratio: float
    """The same of the best cache that has as many pages on all tiers together."""
    compute_saved: float
    """The share of the prompts' floating-point operations that need not be done."""
    hit_tokens: HitTokens
    moved_gib: MovedGib
    device_pages: int
    host_pages: int
    too_long: int
    """Requests that the device has no room for; they count as computed, and keep nothing."""
