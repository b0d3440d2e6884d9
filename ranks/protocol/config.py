"""The settings of one rank's cache, validated once, when they are made."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from ...coordinator.settings import (
    TIMEOUT_S_MAX,
    AtLeastOne,
    Count,
    Seconds,
    Settings,
    TaggedSettings,
    Text,
)
from ...coordinator.stop_policy import StopPolicy
from ...coordinator.transport import Transport
from ...errors import ConfigError
from ...page_format.object_name import MANIFEST_POOL, MARK_POOL
from ...page_format.page_layout import PageLayout
from .eviction_policies import find_policy
from .model_description import FULL_ATTENTION, ModelDescription
from .orders import KV_POOL
from .outside import Control, Peers

PAGES_MAX = (1 << 31) - 1
"""Page numbers are int32."""
RANKS_MAX = 1024
"""The most ranks of a group."""

PREFETCHES_MAX = 1 << 16
"""Each has lanes in every ballot."""

PoolPages = Annotated[int, Meta(ge=0, le=PAGES_MAX)]

TTL_S_MIN = 0.001
"""Agreed time is counted in milliseconds."""

TtlSeconds = Annotated[float, Meta(ge=TTL_S_MIN, le=TIMEOUT_S_MAX)]

RECORD_POOLS = (MANIFEST_POOL, MARK_POOL)
"""Names that stand in place of a pool's for objects that describe others: the manifests of models, and
the marks of groups that have written."""


class WritePolicy(StrEnum):
    """When a computed page is copied to host memory and to storage."""

    WRITE_THROUGH = "write_through"
    """As soon as it is inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once it has been hit often enough to be worth a copy."""
    WRITE_BACK = "write_back"
    """When it is to leave the device; its device pages are free once the copy has settled."""


class Eviction(StrEnum):
    """Which page leaves a full pool first."""

    LRU = "lru"
    """The one that was not used for the longest time, in the replica's logical clock."""
    LFU = "lfu"
    """The one that was hit least often."""
    SLRU = "slru"
    """One that was used once, before any that was hit again."""
    PRIORITY = "priority"
    """One that only requests of the lowest priority used."""


@dataclass(frozen=True, kw_only=True)
class Bounds(Settings):
    """How much may be in flight at a time. What exceeds a bound waits in order, then is refused."""

    prefetches: Annotated[int, Meta(ge=1, le=PREFETCHES_MAX)] = 32
    """Prefetches that the ballot has room for; each costs three lanes in every round."""
    prefetches_waiting: Count = 4096
    """Prefetches that wait for their turn; one more is refused."""
    prefetch_pages: Count | None = None
    """Host pages that all prefetches together may ask for; None stands for half the host pool."""
    persists: AtLeastOne = 64
    """Writes to storage at a time."""
    persists_waiting: Count = 4096
    """Writes that wait, holding their host pages; one more is dropped and counted."""
    pinned_pages: Count | None = None
    """Pages of full attention that `pin` may keep in host memory in all; None stands for half the
    pool. Pages that are on the device only may be at most half of each of its pools."""
    quarantine_pages: Count | None = None
    """Pages that operations may keep which were stopped and do not fall quiet. A store whose operations
    keep more host pages is detached; None stands for a quarter of the host pool. Copies that keep more
    of any pool end the epoch; None stands for half of each pool."""
    remembered_misses: Count = 65536
    """Keys that were promised and could not be read, and as many that are not stored; the oldest are
    forgotten first."""
    inflight_bytes: AtLeastOne = 256 << 20
    """Bytes that this rank's storage loop reads and writes at a time."""


@dataclass(frozen=True, kw_only=True)
class Timeouts(Settings):
    """How long each kind of wait may take, in seconds."""

    round_s: Seconds = 60.0
    """A round. Longer than the engine's compile stalls, shorter than its watchdog."""
    lookup_s: Seconds = 5.0
    """A lookup in the store."""
    persist_s: Seconds = 60.0
    """One write operation."""
    copy_s: Seconds = 60.0
    """One copy between device and host."""
    fence_s: Seconds = 1.0
    """How long an engine that wants to overwrite pages waits for backups that read them."""
    quiesce_s: Seconds = 10.0
    """How long I/O that was stopped may still touch its pages before they are quarantined."""
    miss_memory_s: Seconds = 60.0
    """How long a failed read is remembered, in agreed time."""
    absence_memory_s: Seconds = 1.0
    """How long it is remembered, in agreed time, that not every rank's store has a page: none asks for
    it again meanwhile, also if another group writes it."""
    open_s: Seconds = 180.0
    """How long it may last until every rank has its memory and its store, when a cache is opened; and,
    in agreed time, until every rank has a store that is attached later."""
    flush_s: Seconds = 120.0
    """How long `flush` and `close` wait for what is in flight, in agreed time."""


class PoolSettings(TaggedSettings, frozen=True, kw_only=True):
    """A pool beside full attention's."""

    kind: ClassVar[str]

    pool: str
    """The pool's name; part of the name of every object in storage."""
    layout: PageLayout
    device_pages: PoolPages = 0
    """Pages on the device that are the cache's own; none under an engine that lends its pages."""
    host_pages: PoolPages

    def _whose(self) -> str:
        return f"pool {self.pool!r}: "

    def __post_init__(self) -> None:
        super().__post_init__()
        reserved = (KV_POOL, *RECORD_POOLS)
        if not re.fullmatch("[a-z0-9.-]{1,32}", self.pool) or self.pool in reserved:
            raise ConfigError(
                f"a pool cannot be called {self.pool!r}; use up to 32 lower-case letters and"
                f" digits, and not {', '.join(map(repr, reserved))}, which have a meaning already"
            )


class SlidingWindow(PoolSettings, frozen=True, kw_only=True, tag="sliding_window"):
    """The KV of layers that attend to the last `window_tokens` tokens only: a pool of its own.

    The layout's pages have as many tokens as those of full attention.
    """

    kind: ClassVar[str] = "sliding_window"
    pool: str = "window"
    window_tokens: AtLeastOne

    @property
    def reach_tokens(self) -> int:
        """The tokens of the window."""
        return self.window_tokens


class Recurrent(PoolSettings, frozen=True, kw_only=True, tag="recurrent"):
    """A recurrent state (Mamba, linear attention): one page of its own pool for each checkpoint.

    A state stands for everything before it, whatever its length, so its layout is that of a page of
    one token. `device_pages` are slots for checkpoints and for the states that requests work on, one
    for each.
    """

    kind: ClassVar[str] = "recurrent"
    pool: str = "state"
    checkpoint_tokens: AtLeastOne
    """A checkpoint is kept at every multiple of this, which is a multiple of the page's tokens."""

    @property
    def reach_tokens(self) -> int:
        """The tokens from one checkpoint to the next."""
        return self.checkpoint_tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout.page_tokens != 1:
            raise ConfigError(
                f"pool {self.pool!r}: the layout of a state has pages of"
                f" {self.layout.page_tokens} tokens, must be 1"
            )


ComponentConfig = SlidingWindow | Recurrent


ANY_NAMESPACE = "*"
"""Stands for every namespace that has no limit of its own."""


@dataclass(frozen=True, kw_only=True)
class NamespaceLimit(Settings):
    """How much one namespace may keep in the cache, and for how long."""

    namespace: str
    """`*` stands for each namespace that is not named."""
    device_pages: Count | None = None
    """Full-attention pages on the device beyond which its least recently used leave."""
    host_pages: Count | None = None
    """Full-attention pages in host memory beyond which its least recently used leave."""
    ttl_s: TtlSeconds | None = None
    """How long, in agreed time, pages stay in memory unused. Storage has limits of its own."""

    def _whose(self) -> str:
        return f"limit of namespace {self.namespace!r}: "

    @property
    def bounds_something(self) -> bool:
        """Whether the namespace may not keep what it likes."""
        return (self.device_pages, self.host_pages, self.ttl_s) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class OperationSettings(Settings):
    """How long operations may take, and how many there may be: what every layer is told."""

    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    bounds: Bounds = field(default_factory=Bounds)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True, kw_only=True)
class GroupSettings(OperationSettings):
    """What the user of every engine may say of a group."""

    store: Text | None = field(default=None, repr=False)
    """The store's URI (L3), which may have a password in it; None for host memory alone. `{rank}` in it
    stands for the rank, where each has its own."""
    pipeline_depth: Annotated[int, Meta(ge=0, le=1)] = 1
    """1: a step applies the verdicts of the step before. 0: of its own round, which it waits for."""
    transport: Transport = Transport.AUTO
    """The transport of the rounds. `auto` chooses one by the hosts of the ranks, and says which and why
    (`CacheStats.transport`)."""


@dataclass(frozen=True, kw_only=True)
class EvictionSettings(OperationSettings):
    """What leaves first, and how much each namespace may keep."""

    eviction: str = Eviction.LRU
    """One of `Eviction`, or the name of a policy that was registered
    (`register_eviction_policy`)."""
    limits: tuple[NamespaceLimit, ...] = ()
    """Quotas and times to live of namespaces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        find_policy(self.eviction)
        require_distinct("namespaces have one limit each", [each.namespace for each in self.limits])


@dataclass(frozen=True, kw_only=True)
class WriteSettings(Settings):
    """When a cache copies its own device pages to host memory."""

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_hits: AtLeastOne = 2
    """Under `write_through_selective`: how often a prefix must be hit before it is backed up."""


@dataclass(frozen=True, kw_only=True)
class RankCacheConfig(GroupSettings, EvictionSettings):
    """What every cache of a rank needs to know, whoever owns the device pages.

    All but the pool sizes must be equal on every rank; of those the smallest is used.
    """

    model: Text
    """The model's name; part of every key."""
    weights_version: str = "0"
    """Changes whenever the weights do; part of every key."""
    weights: str = ""
    """The part of `weights_version` that is of the weights alone, if more is in it: a warning says if a
    store has the pages of these weights in another layout."""
    layout: PageLayout
    """The layout of full attention's pages, which every model has."""
    components: tuple[ComponentConfig, ...] = ()
    """The kinds of state that the model keeps beside full attention, each in a pool of its own."""
    absent_columns: tuple[str, ...] = ()
    """The optional columns of the layouts that this engine does not keep. It shares its store all the
    same with engines of the same layouts that do."""
    description: ModelDescription | None = None
    """The engine's description of all that the model keeps; what has no pool is refused by name."""
    host_pages: PoolPages
    """Pages in host memory (L2); 0 turns L2 and with it L3 off."""
    populate_host: bool = False
    """Take the host's pages from the system in the background, while no store moves bytes, and not at
    their first use, which can take longer than the copy into them."""
    peers: Peers | None = None
    """Set where pages are served to other groups, or read from them, directly out of host memory."""
    control: Control | None = None
    """Set where an operator may ask the group for something while it serves."""
    pipeline_stages: AtLeastOne = 1
    """Pipeline-parallel stages that the group's ranks are divided in; those of a stage are neighbours,
    and each keeps the layers of its stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("store", "peers"):
            if getattr(self, name) is not None and not self.host_pages:
                raise ConfigError(f"{name} needs host memory: set host_pages to 1 or more")
        require_distinct("pool names must differ", [each.pool for each in self.components])
        for each in self.components:
            self._check_component(each)
        self._check_columns()

    def pool_sizes(self) -> dict[str, tuple[int, int]]:
        """Return the pages on the device and on the host of each pool, by its name."""
        sizes = {KV_POOL: (0, self.host_pages)}
        sizes |= {each.pool: (each.device_pages, each.host_pages) for each in self.components}
        return sizes

    def _check_component(self, component: ComponentConfig) -> None:
        name, page_tokens = f"pool {component.pool!r}", self.layout.page_tokens
        if bool(component.host_pages) != bool(self.host_pages):
            raise ConfigError(
                f"{name}: host_pages is {component.host_pages} beside {self.host_pages} of full"
                " attention; set both or neither"
            )
        if isinstance(component, Recurrent):
            if component.checkpoint_tokens % page_tokens:
                raise ConfigError(
                    f"{name}: checkpoint_tokens is {component.checkpoint_tokens}, must be a multiple"
                    f" of the page's {page_tokens} tokens"
                )
        elif component.layout.page_tokens != page_tokens:
            raise ConfigError(
                f"{name}: its pages have {component.layout.page_tokens} tokens and those of"
                f" full attention {page_tokens}; they must be equal"
            )

    def _check_columns(self) -> None:
        layouts = [self.layout, *(each.layout for each in self.components)]
        optional = {column.name for layout in layouts for column in layout.optional_columns}
        for name in self.absent_columns:
            if name not in optional:
                raise ConfigError(
                    f"absent_columns names {name!r}, which is no optional column; optional are: "
                    f"{', '.join(sorted(optional)) or 'none'}"
                )
        if self.description is not None:
            kept = [(each.kind, self._kept(each.layout)) for each in self.components]
            self.description.require_covered([(FULL_ATTENTION, self._kept(self.layout)), *kept])

    def _kept(self, layout: PageLayout) -> list[str]:
        """Return the names of the columns that this engine's pages have."""
        return [column.name for column in layout.kept(self.absent_columns)]


@dataclass(frozen=True, kw_only=True)
class CacheConfig(RankCacheConfig, WriteSettings):
    """The settings of a `Cache`, which has device pages of its own."""

    device_pages: Annotated[int, Meta(ge=1, le=PAGES_MAX)]
    """Pages on the device (L1)."""

    def pool_sizes(self) -> dict[str, tuple[int, int]]:
        return super().pool_sizes() | {KV_POOL: (self.device_pages, self.host_pages)}

    def _check_component(self, component: ComponentConfig) -> None:
        super()._check_component(component)
        least, what = 2, "a checkpoint, and the state that a request works on"
        if isinstance(component, SlidingWindow):
            least = -(-component.window_tokens // self.layout.page_tokens) + 1
            what = "a window, and a page to compute in"
        if component.device_pages < least:
            raise ConfigError(
                f"pool {component.pool!r}: device_pages is {component.device_pages}, must be {least}"
                f" or more: {what}"
            )


@dataclass(frozen=True, kw_only=True)
class HostCacheConfig(RankCacheConfig):
    """The settings of a `HostCache`, whose engine lends device pages and says when each is copied."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, each in (
            *((f"pool {each.pool!r}", each) for each in self.components),
            *((f"limit of namespace {each.namespace!r}", each) for each in self.limits),
        ):
            if each.device_pages:
                raise ConfigError(
                    f"{what}: device_pages is {each.device_pages}, and the engine owns the device's"
                    " pages; leave it out"
                )


def require_distinct(what: str, names: Sequence[str]) -> None:
    """Raise `ConfigError`, which begins with `what`, if a name occurs twice."""
    if len(set(names)) != len(names):
        raise ConfigError(f"{what}: {', '.join(names)}")
