"""What a user may give to `LockstepCache.open` beside the model, checked once, when it opens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import ConfigError
from ..settings import PluginSettings, integer, read

WHERE = "LockstepCache.open"

OWN = ("max_tokens", "page_tokens")

TOKENS_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings(PluginSettings):
    """The settings of a cache under `generate()`; equal on every rank."""

    where: ClassVar[str] = WHERE

    pipeline_depth: int = 0
    """No forward pass hides a round here: `reuse` waits for what it asks for."""
    max_tokens: int = 4096
    """The tokens of a sequence for which there is memory beside the model; what is longer goes on in
    memory of its own, and is cached up to here."""
    page_tokens: int = 16
    """The tokens of a page: what is cached of a prefix is whole pages."""

    @property
    def pages(self) -> int:
        """The pages of the longest sequence that is cached whole."""
        return -(-self.max_tokens // self.page_tokens)


def parse(given: Mapping[str, Any]) -> GenerateSettings:
    """Return the settings; raises `ConfigError` with the one that is wrong and what it may be."""
    values = read(WHERE, given, OWN)
    for name in OWN:
        if name in values and not 1 <= integer(f"{WHERE}: {name}", values[name]) <= TOKENS_MAX:
            raise ConfigError(f"{WHERE}: {name} is {values[name]}, must be 1 to {TOKENS_MAX}")
    if "adapter_versions" in values:
        raise ConfigError(
            f"{WHERE}: adapter_versions is for engines that serve adapters; see reset"
        )
    for name in ("share", "unsupported_engine"):
        if name in values:
            raise ConfigError(
                f"{WHERE}: {name} is for engines; what `generate` computes is its own"
            )
    settings = GenerateSettings(**values)
    settings.require_host_memory()
    return settings
