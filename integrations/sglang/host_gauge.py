"""Lockstep's host memory as SGLang's gauges read it, in tokens."""

from dataclasses import dataclass

from ...ranks.host_cache import HostCache


@dataclass(frozen=True, slots=True)
class HostGauge:
    """Answers what SGLang's metrics ask of a host pool; the same on every rank."""

    host: HostCache

    @property
    def logical_size(self) -> int:
        """The size of host memory for full attention."""
        sizes = self.host.inspection.config
        return sizes.host_pages * self.host.config.layout.page_tokens

    def available_size(self) -> int:
        """How much of it nothing is in."""
        return self.host.free_host_pages() * self.host.config.layout.page_tokens
