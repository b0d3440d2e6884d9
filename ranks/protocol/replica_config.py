"""Settings of the replica, derived from a cache's settings; equal on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...coordinator.validated_settings import Settings, part_of
from .config import (
    CacheConfig,
    ComponentConfig,
    EvictionSettings,
    RankCacheConfig,
    WriteSettings,
)
from .orders import KV_POOL


@dataclass(frozen=True, kw_only=True)
class ComponentSettings(Settings):
    """Settings of one component (kind of state) in addition to full attention."""

    kind: str
    """The kind of state: `sliding_window` or `recurrent`."""
    pool: str
    device_pages: int
    host_pages: int
    every_pages: int
    """Length of the sliding window, or distance between state checkpoints, in full-attention pages."""

    @classmethod
    def of(
        cls, component: ComponentConfig, page_tokens: int, *, device_pages: int, host_pages: int
    ) -> "ComponentSettings":
        """Return the replica's settings of a component, with the pool sizes agreed by all ranks."""
        return cls(
            kind=component.kind,
            pool=component.pool,
            device_pages=device_pages,
            host_pages=host_pages,
            every_pages=-(-component.reach_tokens // page_tokens),
        )


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(EvictionSettings, WriteSettings):
    """The settings of a replica; equal on every rank."""

    page_tokens: int
    device_pages: int
    """Number of full-attention device pages; 0 if the engine owns the device pages."""
    engine_pages: int = 0
    """Number of full-attention device pages if the engine owns them; 0 if the cache owns them, or if
    the number is unknown."""
    host_pages: int
    components: tuple[ComponentSettings, ...] = ()
    has_store: bool
    model_digest: bytes
    """The digest of all properties in which caches must agree to share pages. It seeds every page key.
    """
    life: bytes = b""
    """Random bytes drawn when the cache is opened. Two values derive from them: the epoch in the
    headers of rounds, and the page keys after a `reset`."""
    names_pages: bool = False
    """Whether events carry page keys, which costs one hash per page of tokens. Ranks may differ,
    because nothing but the events depends on this setting."""

    @classmethod
    def of(
        cls,
        config: RankCacheConfig,
        *,
        pools: Mapping[str, tuple[int, int]],
        model_digest: bytes,
        life: bytes = b"",
        engine_pages: int = 0,
        names_pages: bool = False,
    ) -> "ReplicaConfig":
        """Return the replica's settings, derived from a cache's settings.

        `pools` has, by pool name, the numbers of device and host pages that all ranks agreed on.
        """
        page_tokens, shared = config.layout.page_tokens, part_of(config, EvictionSettings)
        if isinstance(config, CacheConfig):
            shared |= part_of(config, WriteSettings)
        device_pages, host_pages = pools[KV_POOL]
        components = tuple(
            ComponentSettings.of(
                each,
                page_tokens,
                device_pages=pools[each.pool][0],
                host_pages=pools[each.pool][1],
            )
            for each in config.components
        )
        return cls(
            page_tokens=page_tokens,
            device_pages=device_pages,
            engine_pages=engine_pages,
            host_pages=host_pages,
            components=components,
            has_store=config.store is not None,
            model_digest=model_digest,
            life=life,
            names_pages=names_pages,
            **shared,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the rounds: the first 63 bits of `life` as an integer."""
        return int.from_bytes(self.life[:8]) >> 1

    @property
    def prefetch_pages_max(self) -> int:
        """Maximum number of host pages that all prefetches together may request."""
        bound = self.bounds.prefetch_pages
        return max(1, self.host_pages // 2) if bound is None else bound

    @property
    def pinned_pages_max(self) -> int:
        """Maximum number of full-attention host pages that all pins together may keep."""
        bound = self.bounds.pinned_pages
        return (self.host_pages or self.device_pages) // 2 if bound is None else bound

    def pool_pages(self, tier: int) -> tuple[int, ...]:
        """Return the number of pages in each pool of one tier, in the order of the components."""
        full = (self.device_pages, self.host_pages)[tier]
        return (full, *((each.device_pages, each.host_pages)[tier] for each in self.components))
