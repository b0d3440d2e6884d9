"""The settings of one rank's cache, validated once, when they are made."""

import re
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import ClassVar

from msgspec import Struct

from ...coordinator.collective import Transport
from ...coordinator.stop_policy import StopPolicy
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

RECORD_POOLS = (MANIFEST_POOL, MARK_POOL)
"""Names that stand in place of a pool's for objects that describe others: the manifests of models, and
the marks of groups that have written."""

TIMEOUT_S_MAX = 1e6
"""Every wait is bounded: no timeout is longer than eleven days."""


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
    pinned_pages: int | None = None
    """Pages of full attention that `pin` may keep in host memory in all; None stands for half the
    pool. Pages that are on the device only may be at most half of each of its pools."""
    quarantine_pages: int | None = None
    """Pages that operations may keep which were stopped and do not fall quiet. A store whose operations
    keep more host pages is detached; None stands for a quarter of the host pool. Copies that keep more
    of any pool end the epoch; None stands for half of each pool."""
    remembered_misses: int = 65536
    """Keys that were promised and could not be read, and as many that are not stored; the oldest are
    forgotten first."""
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
            "pinned_pages",
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
    """How long I/O that was stopped may still touch its pages before they are quarantined."""
    miss_memory_s: float = 60.0
    """How long a failed read is remembered, in agreed time."""
    absence_memory_s: float = 1.0
    """How long it is remembered, in agreed time, that not every rank's store has a page: none asks for
    it again meanwhile, also if another group writes it."""
    open_s: float = 180.0
    """How long it may last until every rank has its memory and its store, when a cache is opened; and,
    in agreed time, until every rank has a store that is attached later."""
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


class SlidingWindow(Struct, frozen=True, kw_only=True, tag="sliding_window"):
    """The KV of layers that attend to the last `window_tokens` tokens only: a pool of its own."""

    kind: ClassVar[str] = "sliding_window"
    window_tokens: int
    layout: PageLayout
    """The layout of its pages, which have as many tokens as those of full attention."""
    device_pages: int
    host_pages: int
    pool: str = "window"
    """The pool's name; part of the name of every object in storage."""

    def __post_init__(self) -> None:
        _check_pool(self)
        if self.window_tokens < 1:
            raise ConfigError(
                f"pool {self.pool!r}: window_tokens is {self.window_tokens}, must be 1 or more"
            )


class Recurrent(Struct, frozen=True, kw_only=True, tag="recurrent"):
    """A recurrent state (Mamba, linear attention): one page of its own pool for each checkpoint.

    A state stands for everything before it, whatever its length, so its layout is that of a page of
    one token.
    """

    kind: ClassVar[str] = "recurrent"
    checkpoint_tokens: int
    """A checkpoint is kept at every multiple of this, which is a multiple of the page's tokens."""
    layout: PageLayout
    device_pages: int
    """Slots for checkpoints and for the states that requests work on, one for each."""
    host_pages: int
    pool: str = "state"
    """The pool's name; part of the name of every object in storage."""

    def __post_init__(self) -> None:
        _check_pool(self)
        if self.layout.page_tokens != 1:
            raise ConfigError(
                f"pool {self.pool!r}: the layout of a state has pages of"
                f" {self.layout.page_tokens} tokens, must be 1"
            )


ComponentConfig = SlidingWindow | Recurrent


def _check_pool(component: ComponentConfig) -> None:
    reserved = (KV_POOL, *RECORD_POOLS)
    if not re.fullmatch("[a-z0-9.-]{1,32}", component.pool) or component.pool in reserved:
        raise ConfigError(
            f"a pool cannot be called {component.pool!r}; use up to 32 lower-case letters and"
            f" digits, and not {', '.join(map(repr, reserved))}, which have a meaning already"
        )
    for name in ("device_pages", "host_pages"):
        value = getattr(component, name)
        if not 0 <= value <= PAGES_MAX:
            raise ConfigError(
                f"pool {component.pool!r}: {name} is {value}, must be 0 to {PAGES_MAX}"
            )


TTL_S_MIN = 0.001
"""Agreed time is counted in milliseconds."""

ANY_NAMESPACE = "*"
"""Stands for every namespace that has no limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceLimit:
    """How much one namespace may keep in the cache, and for how long."""

    namespace: str
    """`*` stands for each namespace that is not named."""
    device_pages: int | None = None
    """Full-attention pages on the device beyond which its least recently used leave."""
    host_pages: int | None = None
    """Full-attention pages in host memory beyond which its least recently used leave."""
    ttl_s: float | None = None
    """How long, in agreed time, pages stay in memory unused. Storage has limits of its own."""

    @property
    def bounds_something(self) -> bool:
        """Whether the namespace may not keep what it likes."""
        return (self.device_pages, self.host_pages, self.ttl_s) != (None, None, None)

    def __post_init__(self) -> None:
        for name in ("device_pages", "host_pages"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(
                    f"limit of namespace {self.namespace!r}: {name} is {value}, must be 0 or more"
                )
        if self.ttl_s is not None and not TTL_S_MIN <= self.ttl_s <= TIMEOUT_S_MAX:
            raise ConfigError(
                f"limit of namespace {self.namespace!r}: ttl_s is {self.ttl_s}, must be"
                f" {TTL_S_MIN} to {TIMEOUT_S_MAX:.0f}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Everything that one rank's cache needs to know.

    All but the pool sizes must be equal on every rank; of those the smallest is used.
    """

    model: str
    """The model's name; part of every key."""
    weights_version: str = "0"
    """Changes whenever the weights do; part of every key."""
    layout: PageLayout
    """The layout of full attention's pages, which every model has."""
    components: tuple[ComponentConfig, ...] = ()
    """The kinds of state that the model keeps beside full attention, each in a pool of its own."""
    absent_columns: tuple[str, ...] = ()
    """The optional columns of the layouts that this engine does not keep. It shares its store all the
    same with engines of the same layouts that do."""
    description: ModelDescription | None = None
    """The engine's description of all that the model keeps; what has no pool is refused by name."""
    device_pages: int = 0
    """Pages on the device (L1); 0 where the engine owns them and lends them for copies."""
    host_pages: int
    """Pages in host memory (L2); 0 turns L2 and with it L3 off."""
    populate_host: bool = False
    """Take the host's pages from the system in the background, while no store moves bytes, and not at
    their first use, which can take longer than the copy into them."""
    store: str | None = field(default=None, repr=False)
    """The store's URI (L3), which may have a password in it, or None. `{rank}` in it stands
    for the rank, where each has its own."""
    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_hits: int = 2
    """Under `write_through_selective`: how often a prefix must be hit before it is backed up."""
    eviction: str = Eviction.LRU
    """One of `Eviction`, or the name of a policy that was registered
    (`register_eviction_policy`)."""
    limits: tuple[NamespaceLimit, ...] = ()
    """Quotas and times to live of namespaces."""
    peers: Peers | None = None
    """Set where pages are served to other groups, or read from them, directly out of host memory."""
    control: Control | None = None
    """Set where an operator may ask the group for something while it serves."""
    pipeline_stages: int = 1
    """Pipeline-parallel stages that the group's ranks are divided in; those of a stage are neighbours,
    and each keeps the layers of its stage."""
    pipeline_depth: int = 1
    """1: a step applies the verdicts of the step before. 0: of its own round, which it waits for."""
    transport: Transport = Transport.AUTO
    """The transport of the rounds. `auto` chooses one by the hosts of the ranks, and says which and why
    (`CacheStats.transport`)."""
    bounds: Bounds = field(default_factory=Bounds)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty; give the model's name")
        if not 0 <= self.device_pages <= PAGES_MAX:
            raise ConfigError(f"device_pages is {self.device_pages}, must be 0 to {PAGES_MAX}")
        if not 0 <= self.host_pages <= PAGES_MAX:
            raise ConfigError(f"host_pages is {self.host_pages}, must be 0 to {PAGES_MAX}")
        if self.pipeline_stages < 1:
            raise ConfigError(f"pipeline_stages is {self.pipeline_stages}, must be 1 or more")
        if self.pipeline_depth not in (0, 1):
            raise ConfigError(f"pipeline_depth is {self.pipeline_depth}, must be 0 or 1")
        for name, choices in (("transport", Transport), ("write_policy", WritePolicy)):
            value = getattr(self, name)
            try:
                # What is compared by identity later must not be the text that equals it.
                object.__setattr__(self, name, choices(value))
            except ValueError:
                raise ConfigError(
                    f"{name} is {value!r}, must be one of {', '.join(choices)}"
                ) from None
        find_policy(self.eviction)
        for name in ("store", "peers"):
            if getattr(self, name) is not None and not self.host_pages:
                raise ConfigError(f"{name} needs host memory: set host_pages to 1 or more")
        self._check_components()
        self._check_columns()

    def pool_sizes(self) -> dict[str, tuple[int, int]]:
        """Return the pages on the device and on the host of each pool, by its name."""
        sizes = {KV_POOL: (self.device_pages, self.host_pages)}
        sizes |= {each.pool: (each.device_pages, each.host_pages) for each in self.components}
        return sizes

    def _check_components(self) -> None:
        if self.selective_hits < 1:
            raise ConfigError(f"selective_hits is {self.selective_hits}, must be 1 or more")
        limited = [limit.namespace for limit in self.limits]
        if len(set(limited)) != len(limited):
            raise ConfigError(f"namespaces have one limit each: {', '.join(limited)}")
        pools = [component.pool for component in self.components]
        if len(set(pools)) != len(pools):
            raise ConfigError(f"pool names must differ: {', '.join(pools)}")
        page_tokens = self.layout.page_tokens
        for component in self.components:
            name = f"pool {component.pool!r}"
            if bool(component.device_pages) != bool(self.device_pages):
                raise ConfigError(
                    f"{name}: device_pages is {component.device_pages} beside {self.device_pages} of"
                    " full attention; a model with such a pool needs device pages of both"
                )
            if bool(component.host_pages) != bool(self.host_pages):
                raise ConfigError(
                    f"{name}: host_pages is {component.host_pages} beside {self.host_pages} of full"
                    " attention; set both or neither"
                )
            if isinstance(component, SlidingWindow):
                if component.layout.page_tokens != page_tokens:
                    raise ConfigError(
                        f"{name}: its pages have {component.layout.page_tokens} tokens and those of"
                        f" full attention {page_tokens}; they must be equal"
                    )
                least = -(-component.window_tokens // page_tokens) + 1
                if self.device_pages and component.device_pages < least:
                    raise ConfigError(
                        f"{name}: device_pages is {component.device_pages}, must be {least} or more:"
                        " a window, and a page to compute in"
                    )
            elif component.checkpoint_tokens < 1 or component.checkpoint_tokens % page_tokens:
                raise ConfigError(
                    f"{name}: checkpoint_tokens is {component.checkpoint_tokens}, must be a multiple"
                    f" of the page's {page_tokens} tokens"
                )
            elif component.device_pages == 1:
                raise ConfigError(
                    f"{name}: device_pages is 1, must be 2 or more: a checkpoint, and the state that"
                    " a request works on"
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
