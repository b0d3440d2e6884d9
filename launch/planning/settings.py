"""What is to be planned: a trace, a model, and the sizes to try."""

from dataclasses import asdict, dataclass
from math import inf, isinf
from typing import TypedDict, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What all points have in common; it travels to workers as JSON."""

    trace: str | None = None
    """None stands for the built-in workload."""
    requests: int | None = None
    model: str = "llama"
    dtype: str = "bfloat16"
    tp: int = 1


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

    def as_record(self) -> dict[str, object]:
        """Return it as JSON has it, where null stands for a store without a bound."""
        record: dict[str, object] = asdict(self)
        record["storage_gib"] = None if isinf(self.storage_gib) else self.storage_gib
        return record

    @classmethod
    def from_record(cls, record: dict[str, object]) -> "Size":
        """Return what `as_record` made."""
        storage = record["storage_gib"]
        given = cast(
            "dict[str, float]", record | {"storage_gib": inf if storage is None else storage}
        )
        return cls(**given)  # type: ignore[arg-type]


class ByTier(TypedDict):
    """Prompt tokens by the tier that they came from."""

    device: int
    host: int
    storage: int


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
    hit_tokens: ByTier
    moved_gib: MovedGib
    device_pages: int
    host_pages: int
    too_long: int
    """Requests that the device has no room for; they count as computed, and keep nothing."""
