"""What a user may write into `kv_connector_extra_config`, checked once, when the engine starts."""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..settings import PluginSettings, read

WHERE = "kv_connector_extra_config"


class ConnectorSettings(PluginSettings):
    """The extra configuration of a connector; equal on every rank."""

    __slots__ = ()

    def pages(self, page_bytes: int) -> int:
        """Return the number of host pages for pages that take `page_bytes` bytes on this rank."""
        if self.host_pages is not None:
            return self.host_pages
        assert self.host_memory_gib is not None
        pages = int(self.host_memory_gib * (1 << 30)) // page_bytes
        if not pages:
            raise ConfigError(
                f"{WHERE}: host_memory_gib is {self.host_memory_gib:g}, and one page of this model"
                f" takes {page_bytes} bytes; give more"
            )
        return pages


def parse(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    settings = ConnectorSettings(**read(WHERE, extra))
    if settings.host_memory_gib is None and settings.host_pages is None:
        raise ConfigError(
            f"{WHERE}: give host_memory_gib, the host memory for pages on each rank in GiB, or"
            " host_pages"
        )
    return settings
