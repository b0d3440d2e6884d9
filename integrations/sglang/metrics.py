"""Lockstep's host memory and copies, as SGLang's own metrics tell them."""

from dataclasses import dataclass, field
from typing import Any

from ...ranks.executor.base import BytesMoved
from ...ranks.group.host_cache import HostCache


@dataclass(frozen=True, slots=True)
class HostGauge:
    """Answers what SGLang asks of a host pool, in tokens; the same on every rank."""

    host: HostCache

    @property
    def logical_size(self) -> int:
        """The size of host memory for full attention."""
        sizes = self.host.inspection.config
        return sizes.host_pages * self.host.config.layout.page_tokens

    def available_size(self) -> int:
        """How much of it nothing is in."""
        return self.host.free_host_pages() * self.host.config.layout.page_tokens


@dataclass(slots=True)
class CopyCounters:
    """Tells SGLang's counters what has been copied between the device and host memory."""

    host: HostCache
    told: BytesMoved = field(default_factory=BytesMoved)

    def tell(self, collector: Any) -> None:
        """Add what has been copied since the last call to SGLang's counters of a radix cache."""
        moved, told = self.host.inspection.executor.counts().bytes_moved, self.told
        if moved == told:
            return
        collector.increment_backup_num_bytes(moved.l1_to_l2 - told.l1_to_l2)
        collector.increment_load_back_num_bytes(moved.l2_to_l1 - told.l2_to_l1)
        self.told = moved
