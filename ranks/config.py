"""The settings of one rank's cache, validated once, when they are made."""

from dataclasses import dataclass, field, fields
from enum import StrEnum

from ..coordinator.stop_policy import StopPolicy
from ..errors import ConfigError
from .page_layout import PageLayout

PAGES_MAX = (1 << 31) - 1
"""Page numbers are int32."""

TIMEOUT_S_MAX = 1e6
"""Every wait is bounded; what is longer than eleven days is not."""


class WritePolicy(StrEnum):
    """When a computed page is copied to host memory and to storage."""

    WRITE_THROUGH = "write_through"
    """As soon as it is inserted."""


class Eviction(StrEnum):
    """Which page leaves a full pool first."""

    LRU = "lru"
    """The one that was not used for the longest time, in the replica's logical clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may be in flight at a time. What exceeds a bound waits in order, then is refused."""

    prefetches: int = 32
    """Prefetches that the ballot has room for; each costs three lanes in every round."""
    prefetches_waiting: int = 4096
    """Prefetches that wait for their turn; one more is refused."""
    prefetch_pages: int | None = None
    """Host pages that all prefetches together may ask for; None stands for half the host pool."""
    persists: int = 64
    """Writes to storage at a time."""
    persists_waiting: int = 4096
    """Writes that wait, holding their host pages; one more is dropped and counted."""
    quarantine_pages: int | None = None
    """Host pages that stores which do not fall quiet may hold before the store is detached; None
    stands for a quarter of the host pool."""
    remembered_misses: int = 65536
    """Keys that were promised and could not be read; the oldest are forgotten first."""
    inflight_bytes: int = 256 << 20
    """Bytes that this rank's storage loop reads and writes at a time."""

    def __post_init__(self) -> None:
        for name in ("prefetches", "persists", "inflight_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be 1 or more")
        for name in (
            "prefetches_waiting",
            "persists_waiting",
            "remembered_misses",
            "prefetch_pages",
            "quarantine_pages",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}, must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long each kind of wait may take, in seconds."""

    round_s: float = 60.0
    """A round. Longer than the engine's compile stalls, shorter than its watchdog."""
    lookup_s: float = 5.0
    """A lookup in the store."""
    persist_s: float = 60.0
    """One write operation."""
    copy_s: float = 60.0
    """One copy between device and host."""
    fence_s: float = 1.0
    """How long an engine that wants to overwrite pages waits for backups that read them."""
    quiesce_s: float = 10.0
    """Until I/O that was stopped touches its pages no more; then they are quarantined."""
    miss_memory_s: float = 60.0
    """How long a failed read is remembered, in agreed time."""
    open_s: float = 180.0
    """Until every rank has its memory and its store, when a cache is opened."""
    flush_s: float = 120.0
    """How long `flush` and `close` wait for what is in flight, in agreed time."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            # Written so that it refuses what is not a number, too.
            if not 0 < value <= TIMEOUT_S_MAX:
                raise ConfigError(
                    f"{each.name} is {value}, must be more than 0 and at most {TIMEOUT_S_MAX:.0f}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Everything that one rank's cache needs to know.

    All but the two pool sizes must be equal on every rank; of those the smallest is used.
    """

    model: str
    """The model's name; part of every key."""
    weights_version: str = "0"
    """Changes whenever the weights do; part of every key."""
    layout: PageLayout
    device_pages: int = 0
    """Pages on the device (L1); 0 where the engine owns them and lends them for copies."""
    host_pages: int
    """Pages in host memory (L2); 0 turns L2 and with it L3 off."""
    populate_host: bool = False
    """Take the host's pages from the system at once, in the background, and not at their first use,
    which can take longer than the copy into them."""
    store: str | None = None
    """The store's URI (L3), or None. `{rank}` in it stands for the rank, where each has its own."""
    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: Eviction = Eviction.LRU
    pipeline_depth: int = 1
    """1: a step applies the verdicts of the step before. 0: of its own round, which it waits for."""
    bounds: Bounds = field(default_factory=Bounds)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty; give the model's name")
        if not 0 <= self.device_pages <= PAGES_MAX:
            raise ConfigError(f"device_pages is {self.device_pages}, must be 0 to {PAGES_MAX}")
        if not 0 <= self.host_pages <= PAGES_MAX:
            raise ConfigError(f"host_pages is {self.host_pages}, must be 0 to {PAGES_MAX}")
        if self.pipeline_depth not in (0, 1):
            raise ConfigError(f"pipeline_depth is {self.pipeline_depth}, must be 0 or 1")
        if self.store is not None and not self.host_pages:
            raise ConfigError("a store needs host memory: set host_pages to 1 or more")
