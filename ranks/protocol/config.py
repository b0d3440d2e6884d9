"""Settings of one rank's cache, validated once at construction."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from ...coordinator.stop_policy import StopPolicy
from ...coordinator.transport import Transport
from ...coordinator.validated_settings import (
    TIMEOUT_S_MAX,
    AtLeastOne,
    Count,
    Seconds,
    Settings,
    TaggedSettings,
    Text,
)
from ...errors import ConfigError
from ...page_format.object_name import MANIFEST_POOL, MARK_POOL
from ...page_format.page_layout import PageLayout
from .eviction_policies import find_policy
from .model_description import FULL_ATTENTION, ModelDescription
from .network_config import Control, Peers
from .orders import KV_POOL

PAGES_MAX = (1 << 31) - 1
"""Maximum number of pages in a pool; page numbers are int32."""
RANKS_MAX = 1024

PREFETCHES_MAX = 1 << 16
"""Upper bound of `Bounds.prefetches`, because each prefetch has lanes in every ballot."""

PoolPages = Annotated[int, Meta(ge=0, le=PAGES_MAX)]

TTL_S_MIN = 0.001
"""Minimum time to live in seconds, equal to the resolution of agreed time."""

TtlSeconds = Annotated[float, Meta(ge=TTL_S_MIN, le=TIMEOUT_S_MAX)]

RECORD_POOLS = (MANIFEST_POOL, MARK_POOL)
"""Names that no pool may have. Besides pages, a store holds model manifests, and records of the groups
that have written to it. The names of these objects have a reserved name in place of a pool's name.
"""


class WritePolicy(StrEnum):
    """When a computed page is copied to host memory and then to storage."""

    WRITE_THROUGH = "write_through"
    """Copy each page as soon as it is inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Copy a page once it has been hit `selective_hits` times."""
    WRITE_BACK = "write_back"
    """Copy a page when it is evicted; its device page is freed once the copy has finished or failed."""


class Eviction(StrEnum):
    """Which page is evicted first from a full pool."""

    LRU = "lru"
    """Evict in order of last use, oldest first, by the replica's logical clock."""
    LFU = "lfu"
    """Evict in order of the number of hits, fewest first."""
    SLRU = "slru"
    """Evict pages without a hit before pages that were hit at least once."""
    PRIORITY = "priority"
    """A page has the highest priority of the requests that used it. Evict pages of the lowest priority
    first."""


@dataclass(frozen=True, kw_only=True)
class Bounds(Settings):
    """Limits on operations in flight. Operations beyond a limit wait in a bounded queue or fail."""

    prefetches: Annotated[int, Meta(ge=1, le=PREFETCHES_MAX)] = 32
    """Maximum number of concurrent prefetches; each has three lanes in every round."""
    prefetches_waiting: Count = 4096
    """Maximum length of the prefetch queue; a prefetch beyond the limit is refused."""
    prefetch_pages: Count | None = None
    """Maximum number of host pages that all prefetches together may request; None means half the pool.
    """
    persists: AtLeastOne = 64
    persists_waiting: Count = 4096
    """Maximum number of queued writes to storage. Queued writes pin their host pages. A write beyond
    the limit is dropped and counted."""
    pinned_pages: Count | None = None
    """Maximum number of full-attention host pages that all pins together may keep; None means half the
    pool. Pins of pages that are only on the device may keep half of each device pool."""
    quarantine_pages: Count | None = None
    """Maximum number of pages that quarantined operations may hold. The store is detached if its
    quarantined operations hold more host pages. The epoch ends if quarantined copies hold more pages of
    any pool. None means a quarter of the host pool for a store, and half of the pool for copies."""
    remembered_misses: Count = 65536
    """Maximum number of keys remembered as unreadable. The same number applies separately to keys
    remembered as not stored. The oldest keys are forgotten first."""
    inflight_bytes: AtLeastOne = 256 << 20
    """Maximum number of bytes in flight in this rank's reads and writes of storage."""


@dataclass(frozen=True, kw_only=True)
class Timeouts(Settings):
    """Timeout of each kind of wait, in seconds."""

    round_s: Seconds = 60.0
    """Timeout of a round in seconds. Choose it longer than the engine's compile stalls and shorter than
    the engine's watchdog."""
    lookup_s: Seconds = 5.0
    persist_s: Seconds = 60.0
    copy_s: Seconds = 60.0
    fence_s: Seconds = 1.0
    """Timeout in seconds of `fence`, which waits for backups that read pages the engine wants to
    overwrite."""
    quiesce_s: Seconds = 10.0
    """Seconds that an operation's I/O may continue after the operation is stopped. I/O that takes
    longer may still touch the operation's pages, so the pages are quarantined."""
    miss_memory_s: Seconds = 60.0
    """Seconds for which a failed read is remembered as a miss, in agreed time (equal on all ranks)."""
    absence_memory_s: Seconds = 1.0
    """Seconds, in agreed time (equal on all ranks), for which a page that some rank's store lacks is
    remembered as absent. During this time no rank looks the page up again, even if another group has
    written it."""
    open_s: Seconds = 180.0
    """Timeout in seconds of allocating memory and opening the store on all ranks when a cache is
    opened. Also, in agreed time, the timeout of opening a store that is attached later."""
    flush_s: Seconds = 120.0
    """Timeout, in seconds of agreed time (equal on all ranks), of `flush` and `close`, which wait for
    operations in flight."""


class PoolSettings(TaggedSettings, frozen=True, kw_only=True):
    """Settings of any page pool except the full-attention pool."""

    kind: ClassVar[str]

    pool: str
    """The pool's name; part of every object name in storage."""
    layout: PageLayout
    device_pages: PoolPages = 0
    """Number of device pages that the cache owns; 0 if the engine owns the device pages."""
    host_pages: PoolPages

    def _whose(self) -> str:
        return f"pool {self.pool!r}: "

    def __post_init__(self) -> None:
        super().__post_init__()
        reserved = (KV_POOL, *RECORD_POOLS)
        if not re.fullmatch("[a-z0-9.-]{1,32}", self.pool) or self.pool in reserved:
            raise ConfigError(
                f"a pool cannot be called {self.pool!r}; use up to 32 lower-case letters and"
                f" digits, and not {', '.join(map(repr, reserved))}, which are reserved"
            )


class SlidingWindow(PoolSettings, frozen=True, kw_only=True, tag="sliding_window"):
    """Settings of a pool with the KV of layers that attend only to the last `window_tokens` tokens.

    The layout must have the same `page_tokens` as full attention's layout.
    """

    kind: ClassVar[str] = "sliding_window"
    pool: str = "window"
    window_tokens: AtLeastOne

    @property
    def reach_tokens(self) -> int:
        """The window's length in tokens."""
        return self.window_tokens


class Recurrent(PoolSettings, frozen=True, kw_only=True, tag="recurrent"):
    """Settings of a pool of recurrent states (Mamba, linear attention), one page per state.

    A state is equally large for a prefix of any length, so the pool's layout has one token per page.
    `device_pages` counts slots for checkpoints and one working slot per running request.
    """

    kind: ClassVar[str] = "recurrent"
    pool: str = "state"
    checkpoint_tokens: AtLeastOne
    """The number of tokens between two checkpoints; must be a multiple of full attention's
    `page_tokens`."""

    @property
    def reach_tokens(self) -> int:
        """The number of tokens between two checkpoints."""
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
"""The namespace of a limit that applies to every namespace without a limit of its own."""


@dataclass(frozen=True, kw_only=True)
class NamespaceLimit(Settings):
    """Quota and time to live of one namespace's pages in the cache."""

    namespace: str
    """The namespace that the limit applies to, or `*` for every namespace without a limit of its own.
    """
    device_pages: Count | None = None
    """Maximum number of full-attention device pages. Beyond it, the namespace's least recently used
    pages are evicted."""
    host_pages: Count | None = None
    """Maximum number of full-attention host pages. Beyond it, the namespace's least recently used pages
    are evicted."""
    ttl_s: TtlSeconds | None = None
    """Seconds that unused pages stay on device and host, in agreed time (equal on all ranks). Storage
    has separate limits."""

    def _whose(self) -> str:
        return f"limit of namespace {self.namespace!r}: "

    @property
    def limits_anything(self) -> bool:
        """Whether at least one of the limits is set."""
        return (self.device_pages, self.host_pages, self.ttl_s) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class OperationSettings(Settings):
    """Timeouts and limits of operations, shared by every layer."""

    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    bounds: Bounds = field(default_factory=Bounds)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True, kw_only=True)
class GroupSettings(OperationSettings):
    """Settings of a group that every engine integration offers to its users."""

    store: Text | None = field(default=None, repr=False)
    """The store's URI (L3), which may contain a password; None for no store. `{rank}` in the URI is
    replaced by the rank, so that each rank can have a store to itself."""
    pipeline_depth: Annotated[int, Meta(ge=0, le=1)] = 1
    """Number of steps between a round's launch and its verdict. With 1, a step applies the verdict of
    the previous step's round. With 0, a step waits for the round that it launched."""
    transport: Transport = Transport.AUTO
    """The transport of the rounds. `auto` chooses one that suits the hosts on which the ranks run;
    `CacheStats.transport` reports the choice and the reason."""


@dataclass(frozen=True, kw_only=True)
class EvictionSettings(OperationSettings):
    """Settings of eviction: the policy, and the quotas and times to live of single namespaces."""

    eviction: str = Eviction.LRU
    """Name of the eviction policy: a value of `Eviction`, or a name registered by
    `register_eviction_policy`."""
    limits: tuple[NamespaceLimit, ...] = ()
    """Quota and time to live of single namespaces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        find_policy(self.eviction)
        require_distinct(
            "limits must name each namespace once", [each.namespace for each in self.limits]
        )


@dataclass(frozen=True, kw_only=True)
class WriteSettings(Settings):
    """Settings that decide when a cache backs up the device pages that it owns."""

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_hits: AtLeastOne = 2
    """Number of hits after which a prefix is backed up under `write_through_selective`."""


@dataclass(frozen=True, kw_only=True)
class RankCacheConfig(GroupSettings, EvictionSettings):
    """Settings of one rank's cache that do not depend on who owns the device pages.

    Everything except pool sizes must be equal on every rank. The smallest pool size of all ranks is
    used.
    """

    model: Text
    """The model's name; part of every key."""
    weights_version: str = "0"
    """Version of the weights, part of every key; must change whenever the weights change."""
    weights: str = ""
    """An identifier of the weights alone, for a `weights_version` that covers further facts; empty if
    `weights_version` covers nothing else. If it is set, a store that holds pages of the same weights in
    another layout causes a warning."""
    layout: PageLayout
    """The page layout of full attention, which every model has."""
    components: tuple[ComponentConfig, ...] = ()
    """The model's kinds of state in addition to full attention, each in a separate pool."""
    absent_columns: tuple[str, ...] = ()
    """Names of optional layout columns that this engine does not store. The engine can still share a
    store with engines whose pages have these columns."""
    description: ModelDescription | None = None
    """The engine's description of all state that the model keeps for a prefix. A state that no pool
    stores raises `ConfigError`."""
    host_pages: PoolPages
    """Number of full-attention pages in host memory (L2); 0 disables L2 and L3."""
    populate_host: bool = False
    """Whether to populate host pages in the background while no store transfer runs. Otherwise the
    first use of a page faults, which can take longer than the copy into the page."""
    peers: Peers | None = None
    """Settings of page sharing with other groups, which read and serve host pages directly from host
    memory; None disables it."""
    control: Control | None = None
    """Settings of the socket through which operators send control requests to the running group; None
    for no socket."""
    pipeline_stages: AtLeastOne = 1
    """Number of pipeline-parallel stages of the group. Ranks of one stage are consecutive, and each
    rank keeps the layers of its stage."""

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
        """Return (device pages, host pages), the sizes of each pool, by pool name."""
        sizes = {KV_POOL: (0, self.host_pages)}
        sizes |= {each.pool: (each.device_pages, each.host_pages) for each in self.components}
        return sizes

    def _check_component(self, component: ComponentConfig) -> None:
        name, page_tokens = f"pool {component.pool!r}", self.layout.page_tokens
        if bool(component.host_pages) != bool(self.host_pages):
            raise ConfigError(
                f"{name}: host_pages is {component.host_pages}, and full attention has"
                f" {self.host_pages}; set both or neither"
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
                    f"absent_columns names {name!r}, which is not an optional column; known: "
                    f"{', '.join(sorted(optional)) or 'none'}"
                )
        if self.description is not None:
            kept = [(each.kind, self._kept(each.layout)) for each in self.components]
            self.description.require_covered([(FULL_ATTENTION, self._kept(self.layout)), *kept])

    def _kept(self, layout: PageLayout) -> list[str]:
        """Return the names of the columns that this engine stores in pages of `layout`."""
        return [column.name for column in layout.kept(self.absent_columns)]


@dataclass(frozen=True, kw_only=True)
class CacheConfig(RankCacheConfig, WriteSettings):
    """The settings of a `Cache`, which owns its device pages."""

    device_pages: Annotated[int, Meta(ge=1, le=PAGES_MAX)]
    """Number of full-attention pages on the device (L1)."""

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
    """The settings of a `HostCache`, whose engine owns the device pages and starts each copy."""

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
    """Raise `ConfigError`, with a text that begins with `what`, if a name occurs twice."""
    if len(set(names)) != len(names):
        raise ConfigError(f"{what}: {', '.join(names)}")
