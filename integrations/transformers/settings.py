"""What a user may give to `LockstepCache.open` beside the model, checked once, when it opens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from ..settings import PluginSettings

WHERE = "LockstepCache.open"

_Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(PluginSettings):
    """The settings of a cache under `generate()`; equal on every rank."""

    where: ClassVar[str] = WHERE

    pipeline_depth: Annotated[int, Meta(ge=0, le=1)] = 0
    """No forward pass hides a round here: `reuse` waits for what it asks for."""
    max_tokens: _Tokens = 4096
    """The tokens of a sequence for which there is memory beside the model; what is longer goes on in
    memory of its own, and is cached up to here."""
    page_tokens: _Tokens = 16
    """The tokens of a page: what is cached of a prefix is whole pages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_host_memory()

    @property
    def pages(self) -> int:
        """The pages of the longest sequence that is cached whole."""
        return -(-self.max_tokens // self.page_tokens)
