"""What the cache asks of an executor: carry out orders, report progress, end cleanly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...coordinator.ballot import Progress
from ..orders import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesMoved:
    """Bytes that this rank moved between tiers since the start."""

    l1_to_l2: int = 0
    l2_to_l1: int = 0
    l2_to_l3: int = 0
    l3_to_l2: int = 0


class Executor(Protocol):
    """Carries out orders asynchronously. All methods are called from the engine's thread."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Begin the orders and return without waiting for any of them."""
        ...

    def progress(self) -> list[Progress]:
        """Return what has happened since the last call, in the order in which it happened."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when there is progress to report, at the latest after `timeout_s`."""
        ...

    def trouble(self) -> str | None:
        """Say why this rank cannot go on, or None. It goes into the ballot as ill health."""
        ...

    def bytes_moved(self) -> BytesMoved:
        """Return the bytes moved so far."""
        ...

    def pages_corrupt(self) -> int:
        """Return how many pages this rank read from storage whose bytes were wrong."""
        ...

    def close(self) -> None:
        """Stop everything and wait, bounded, until nothing touches the pools. Idempotent."""
        ...
