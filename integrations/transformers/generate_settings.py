"""The user's settings for `LockstepCache.open`, checked once, when the cache opens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from ..plugin_settings import PluginSettings

WHERE = "LockstepCache.open"

_Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(PluginSettings):
    """The settings of a cache for `generate()`; equal on every rank."""

    where: ClassVar[str] = WHERE

    pipeline_depth: Annotated[int, Meta(ge=0, le=1)] = 0
    """Pipeline depth. The default is 0, because `reuse` waits for each of its rounds, so no forward
    pass could overlap with a round."""
    max_tokens: _Tokens = 4096
    """Number of tokens of a sequence that fit into the preallocated device memory.

    A longer sequence moves to larger memory; only its first `max_tokens` tokens are cached.
    """
    page_tokens: _Tokens = 16
    """Tokens per page; only whole pages of a prefix are cached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_host_memory()

    @property
    def pages(self) -> int:
        """Number of pages in the preallocated device memory: as many as `max_tokens` tokens need."""
        return -(-self.max_tokens // self.page_tokens)
