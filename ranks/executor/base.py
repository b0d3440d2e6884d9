"""The interface of an executor: it carries out orders, reports progress, and ends cleanly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

from ...coordinator.ballot import Progress
from ...coordinator.proposal import Proposal, Readiness
from ...storage_backends.latencies import Histogram
from ...storage_backends.wrappers.metrics import Metrics
from ..protocol.orders import Direction, ObjectTransfer, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesMoved:
    """Bytes that this rank moved between tiers since the start."""

    l1_to_l2: int = 0
    l2_to_l1: int = 0
    l2_to_l3: int = 0
    l3_to_l2: int = 0


@dataclass(frozen=True, slots=True)
class LateCalls:
    """Calls to this rank's stores that had no answer, or not all of it, when their time was up."""

    calls: int = 0
    waited_s: float = 0.0
    """How long these calls took, added up, though calls run side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCounts:
    """Counters of this rank's executor since the start."""

    bytes_moved: BytesMoved = field(default_factory=BytesMoved)
    pages_corrupt: int = 0
    """Pages read from storage whose bytes were wrong."""
    storage_late: LateCalls = field(default_factory=LateCalls)
    copies: Mapping[Direction, Histogram] = field(default_factory=dict[Direction, Histogram])
    """How long copies took, from when they began until the step that heard of their end."""
    calls: Mapping[str, Metrics] = field(default_factory=dict[str, Metrics])
    """Metrics of calls to stores, by kind of store: the URI's scheme with the wrappers before it."""


def added(counts: Sequence[Any]) -> Any:
    """Return what counts of one shape come to: numbers, or dataclasses, mappings and tuples of them."""
    first: Any = counts[0]
    make: Any = first.__class__
    if is_dataclass(first):
        names = (each.name for each in fields(first))
        return make(**{name: added([getattr(each, name) for each in counts]) for name in names})
    if isinstance(first, Mapping):
        keys: dict[Any, None] = dict.fromkeys(key for each in counts for key in each)
        return {key: added([each[key] for each in counts if key in each]) for key in keys}
    return tuple(map(added, zip(*counts, strict=True))) if isinstance(first, tuple) else sum(counts)


class PageServer(Protocol):
    """Lets readers of other groups have host pages of this rank; see `orders.Serve`."""

    @property
    def address(self) -> str:
        """Where readers reach it, as host:port."""
        ...

    def serve(self, operation: int, transfers: Sequence[ObjectTransfer]) -> None:
        """Let readers have these pages, beside others of the operation; does not wait."""
        ...

    def withdraw(self, operation: int, on_quiet: Callable[[int], None]) -> None:
        """Let nobody begin to read them any more; does not wait.

        `on_quiet` is called once with the operation, from any thread, when no reader touches them.
        """
        ...

    def trouble(self) -> str | None:
        """Say why it has ended by itself, or None."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Cut all readers off; say whether nothing touches a page any more in time. Idempotent."""
        ...


class Executor(Protocol):
    """Carries out orders asynchronously.

    All methods are called from the engine's thread, but for `counts`, and for `stage`, of which the
    caller sees to it that no other call about proposals runs beside it.
    """

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Begin the orders and return without waiting for any of them.

        Copies to or from pages that an engine lends do not begin here, and wait for `begin_copies`.
        """
        ...

    def begin_copies(self, direction: Direction) -> None:
        """Begin the copies that wait, since the engine's device has come to where they may run.

        Where no engine lends device pages no copy ever waits.
        """
        ...

    def progress(self) -> list[Progress]:
        """Return what has happened since the last call, in the order in which it happened."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when there is progress to report, at the latest after `timeout_s`.

        Where it is only that fetches have come further, it is gathered for some milliseconds. Returns
        at once while copies wait for `begin_copies`, which is the caller's to call.
        """
        ...

    def trouble(self) -> str | None:
        """Say why this rank cannot go on, or None. It goes into the ballot as ill health."""
        ...

    def stage(self, proposal: Proposal) -> None:
        """Begin in the background what a proposal needs on this rank; at most one is staged.

        Its store is opened. Raises `ConfigError` for a store that makes no sense on any rank; nothing
        is staged then. What else is wrong is a refusal.
        """
        ...

    def readiness(self, proposal: Proposal) -> Readiness | str:
        """Say how far the preparation of a staged proposal is, or why this rank refuses it."""
        ...

    def unstage(self, proposal: Proposal) -> None:
        """Give up what was staged: its store is closed again in the background."""
        ...

    def serving_address(self) -> str:
        """Return where readers of other groups find this rank's pages; empty if they cannot."""
        ...

    def counts(self) -> ExecutorCounts:
        """Return what was done and seen so far; any thread may ask."""
        ...

    def close(self) -> None:
        """Stop everything and wait, bounded, until nothing touches the pools. Idempotent."""
        ...
