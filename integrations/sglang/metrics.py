"""Reports Lockstep's host memory and copies in SGLang's own metrics."""

from dataclasses import dataclass, field
from typing import Any

from ...ranks.executor.base import BytesMoved
from ...ranks.group.host_cache import HostCache


@dataclass(frozen=True, slots=True)
class HostGauge:
    """Size and free space of Lockstep's host pool in tokens, in the form that SGLang's metrics read."""

    host: HostCache

    @property
    def logical_size(self) -> int:
        """Number of tokens that fit into the host pool for full attention."""
        sizes = self.host.inspection.config
        return sizes.host_pages * self.host.config.layout.page_tokens

    def available_size(self) -> int:
        """Return the number of tokens for which the host pool has free pages."""
        return self.host.free_host_pages() * self.host.config.layout.page_tokens


@dataclass(slots=True)
class CopyCounters:
    """Increases SGLang's own counters by the bytes that Lockstep has copied between device and host."""

    host: HostCache
    reported: BytesMoved = field(default_factory=BytesMoved)

    def report(self, collector: Any) -> None:
        """Increase SGLang's radix-cache counters by the bytes copied since the last call."""
        moved, reported = self.host.inspection.executor.counts().bytes_moved, self.reported
        if moved == reported:
            return
        collector.increment_backup_num_bytes(moved.l1_to_l2 - reported.l1_to_l2)
        collector.increment_load_back_num_bytes(moved.l2_to_l1 - reported.l2_to_l1)
        self.reported = moved
