"""Converts bytes of memory to pages of a model's pools and back, by the same rules as a replay."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...page_format.object_header import HEADER_BYTES
from ...page_format.page_layout import PageLayout
from ...ranks.protocol.config import ComponentConfig
from ...ranks.protocol.orders import KV_POOL
from ...ranks.protocol.replica_config import ComponentSettings, ReplicaConfig
from ...small_engine.profile import Profile

GIB = 1 << 30
_PAGES_MAX = 1 << 30
_CHUNK_TOKENS = 8192
"""Maximum tokens of a prompt that are computed at a time if the model has a window pool."""


@dataclass(frozen=True)
class ModelPools:
    """The pools of a model on one of `tp` ranks, with pages of `page_tokens` tokens."""

    profile: Profile
    tp: int
    page_tokens: int

    @cached_property
    def layouts(self) -> Mapping[str, PageLayout]:
        """The page layout of each pool."""
        others = self._components(1, 1)
        full = {KV_POOL: self.profile.layout(self.page_tokens)}
        return full | {each.pool: each.layout for each in others}

    @cached_property
    def page_bytes(self) -> Mapping[str, int]:
        """Bytes of a page (or of a recurrent state) on one rank, by pool."""
        return {pool: layout.shard(0, self.tp).page_bytes for pool, layout in self.layouts.items()}

    @cached_property
    def stored_bytes(self) -> Mapping[str, int]:
        """By pool: bytes that the objects of one page occupy in the store, including their headers.

        A page has one object per rank, or a single object if its content is replicated.
        """
        shards = {pool: layout.shard(0, self.tp) for pool, layout in self.layouts.items()}
        return {
            pool: (1 if shard.replicated else self.tp) * (shard.page_bytes + HEADER_BYTES)
            for pool, shard in shards.items()
        }

    def nbytes(self, pages: int, tier: str = "device") -> int:
        """Return the bytes of `pages` full-attention pages and of their window and state pages."""
        sizes = self.profile.sizes(self.page_tokens, pages, pages)
        others = sum(
            sizes[f"{pool}_{tier}_pages"] * page_bytes
            for pool, page_bytes in self.page_bytes.items()
            if pool != KV_POOL
        )
        return pages * self.page_bytes[KV_POOL] + others

    def pages(self, nbytes: float, tier: str = "device") -> int:
        """Return how many full-attention pages fit `nbytes`, including their window and state pages."""
        fits, too_many = 0, min(_PAGES_MAX, int(nbytes) // self.page_bytes[KV_POOL] + 1)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.nbytes(middle, tier) <= nbytes:
                fits = middle
            else:
                too_many = middle
        return fits

    def chunk_pages(self, device_pages: int) -> int:
        """Return how many pages of a prompt can be computed at once without filling the window pool."""
        window = self.profile.window
        if window is None:
            return device_pages
        sizes = self.profile.sizes(self.page_tokens, device_pages, 0)
        room = sizes["window_device_pages"] - window.pages(self.page_tokens) - 1
        return max(1, min(_CHUNK_TOKENS // self.page_tokens, room))

    def replica(
        self, device_pages: int, host_pages: int, *, has_store: bool, policy: str
    ) -> ReplicaConfig:
        """Return a replica's configuration in which each page counts as one token (`PagedPrompt`)."""
        components = tuple(
            ComponentSettings.of(
                each,
                self.page_tokens,
                device_pages=each.device_pages,
                host_pages=each.host_pages if host_pages else 0,
            )
            for each in self._components(device_pages, host_pages)
        )
        return ReplicaConfig(
            page_tokens=1,
            device_pages=device_pages,
            host_pages=host_pages,
            components=components,
            has_store=has_store,
            model_digest=self.profile.name.encode(),
            eviction=policy,
        )

    def _components(self, device_pages: int, host_pages: int) -> tuple[ComponentConfig, ...]:
        return self.profile.components(self.page_tokens, device_pages, host_pages)
