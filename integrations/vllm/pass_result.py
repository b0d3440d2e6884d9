"""What the scheduler is told after a pass."""

from collections.abc import Iterable
from dataclasses import dataclass

from .tracked import TrackedRequest


@dataclass(frozen=True, slots=True)
class PassResult:
    """Says what the scheduler is to hear after a step, the same on every rank and in the same order.

    In the order of arrival: the scheduler frees blocks in the order in which it hears of them, and the
    engine's ids, which are others on each rank, have no order that all ranks could agree on.
    """

    loaded: tuple[str, ...]
    """Requests whose load is over, well or not."""
    failed: tuple[str, ...]
    """The requests in `loaded` whose load failed."""
    freed: tuple[str, ...]
    """Finished requests whose pages are free."""


def ids_of(requests: Iterable[TrackedRequest]) -> tuple[str, ...]:
    """Return the engine's ids of requests, in the order in which they arrived."""
    return tuple(each.request.request_id for each in sorted(requests, key=lambda each: each.number))
