"""An executor that does nothing, to measure the cost of the replicated state alone."""

from collections.abc import Sequence

from ..coordinator.ballot import Progress
from ..coordinator.proposal import Proposal, Readiness
from ..ranks.executor.base import ExecutorCounts
from ..ranks.protocol.orders import Direction, Order


class SilentExecutor:
    """Accepts orders and never reports progress, so every operation remains in flight."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Ignore the orders."""

    def begin_copies(self, direction: Direction) -> None:
        """Start no copies."""

    def progress(self) -> list[Progress]:
        return []

    def wait(self, timeout_s: float) -> None:
        """Return at once, without waiting for progress."""

    def trouble(self) -> str | None:
        return None

    def stage(self, proposal: Proposal) -> None:
        """Ignore the proposal."""

    def readiness(self, proposal: Proposal) -> Readiness | str:  # noqa: ARG002 - none is staged.
        return Readiness.UNSTAGED

    def unstage(self, proposal: Proposal) -> None:
        """Ignore the proposal."""

    def counts(self) -> ExecutorCounts:
        return ExecutorCounts()

    def serving_address(self) -> str:
        return ""

    def close(self) -> None:
        """Release nothing, because this executor owns nothing."""
