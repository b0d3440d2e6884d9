"""The replica's part of a cache's settings; equal on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...coordinator.settings import Settings, part_of
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
    """One component beside full attention."""

    kind: str
    """`sliding_window` or `recurrent`."""
    pool: str
    device_pages: int
    host_pages: int
    every_pages: int
    """Its window, or the distance of its checkpoints, in pages of tokens."""

    @classmethod
    def of(
        cls, component: ComponentConfig, page_tokens: int, *, device_pages: int, host_pages: int
    ) -> "ComponentSettings":
        """Return the settings of a component in the sizes that were agreed on."""
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
    names_pages: bool = False
    """Whether notices name pages by their keys, which costs a hash for each page of tokens. It changes
    nothing else, so it may differ between ranks."""

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
        """Return the replica's part of a cache's settings.

        `pools` has, by name of pool, the pages on the device and on the host that were agreed on.
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
