"""The replica's part of a cache's settings; equal on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...coordinator.stop_policy import StopPolicy
from .config import (
    Bounds,
    CacheConfig,
    Eviction,
    NamespaceLimit,
    Recurrent,
    SlidingWindow,
    Timeouts,
    WritePolicy,
)
from .orders import KV_POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSettings:
    """One component beside full attention."""

    kind: str
    """`sliding_window` or `recurrent`."""
    pool: str
    device_pages: int
    host_pages: int
    every_pages: int
    """Its window, or the distance of its checkpoints, in pages of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """The settings of a replica; equal on every rank."""

    page_tokens: int
    device_pages: int
    """Device pages of full attention; 0 where the engine owns the device's pages."""
    engine_pages: int = 0
    """How many device pages the engine has, where it owns them; 0 where nobody has said so."""
    host_pages: int
    """Host pages of full attention."""
    components: tuple[ComponentSettings, ...] = ()
    has_store: bool
    model_digest: bytes
    """The digest of all that must agree before pages may be shared; every key begins with it."""
    life: bytes = b""
    """Drawn when the cache was opened; keys after a `reset` are this life's alone, and so is the epoch
    that its rounds have in their headers."""
    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_hits: int = 2
    eviction: str = Eviction.LRU
    limits: tuple[NamespaceLimit, ...] = ()
    names_pages: bool = False
    """Whether notices name pages by their keys, which costs a hash for each page of tokens. It changes
    nothing else, so it may differ between ranks."""
    bounds: Bounds = field(default_factory=Bounds)
    timeouts: Timeouts = field(default_factory=Timeouts)

    @classmethod
    def of(
        cls,
        config: CacheConfig,
        *,
        pools: Mapping[str, tuple[int, int]],
        model_digest: bytes,
        life: bytes = b"",
        engine_pages: int = 0,
        names_pages: bool = False,
    ) -> "ReplicaConfig":
        """Return the replica's part of a cache's settings.

        `pools` has, by name of pool, the pages on the device and on the host that were agreed on.
        """
        device_pages, host_pages = pools[KV_POOL]
        return cls(
            page_tokens=config.layout.page_tokens,
            device_pages=device_pages,
            engine_pages=engine_pages,
            host_pages=host_pages,
            components=tuple(
                _component(each, config.layout.page_tokens, *pools[each.pool])
                for each in config.components
            ),
            has_store=config.store is not None,
            model_digest=model_digest,
            life=life,
            stop_policy=config.stop_policy,
            write_policy=config.write_policy,
            selective_hits=config.selective_hits,
            eviction=config.eviction,
            limits=config.limits,
            names_pages=names_pages,
            bounds=config.bounds,
            timeouts=config.timeouts,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the rounds: the life as a number of 63 bits."""
        return int.from_bytes(self.life[:8]) >> 1

    @property
    def prefetch_pages_max(self) -> int:
        """Host pages that all prefetches together may ask for."""
        bound = self.bounds.prefetch_pages
        return max(1, self.host_pages // 2) if bound is None else bound

    @property
    def pinned_pages_max(self) -> int:
        """Pages of full attention that pins may keep."""
        bound = self.bounds.pinned_pages
        return (self.host_pages or self.device_pages) // 2 if bound is None else bound

    def pool_pages(self, tier: int) -> tuple[int, ...]:
        """Return the capacities of the pools of one tier, by component."""
        full = (self.device_pages, self.host_pages)[tier]
        return (full, *((each.device_pages, each.host_pages)[tier] for each in self.components))


def _component(
    config: SlidingWindow | Recurrent, page_tokens: int, device: int, host: int
) -> ComponentSettings:
    tokens = config.window_tokens if isinstance(config, SlidingWindow) else config.checkpoint_tokens
    return ComponentSettings(
        kind=config.kind,
        pool=config.pool,
        device_pages=device,
        host_pages=host,
        every_pages=-(-tokens // page_tokens),
    )
