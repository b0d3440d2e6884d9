"""Timed events of one rank, for traces and latency metrics.

Times are seconds of `time.monotonic`, which all processes of one host share. Most events describe
finished work. Operations, however, emit separate events at their start, at each change of phase and at
their end, because they can last longer than the subscriber. Without a subscriber no event is created.
"""

from collections.abc import Callable
from typing import Final

from ...coordinator.codec import Record
from .orders import Direction

WAYS: Final = {
    Direction.TO_HOST: ("device", "host"),
    Direction.TO_DEVICE: ("host", "device"),
}
"""(source tier, destination tier) of each copy direction."""


class StepHalf(Record, frozen=True):
    """The time that one half of a cache step (apply a verdict, launch a round) blocked the engine."""

    step: int
    launches: bool
    """True for the half of a step that launches the round; false for the half that applies a verdict.
    """
    began_s: float
    ended_s: float


class RoundHeld(Record, frozen=True):
    """A round has finished on this rank, because a verdict arrived or the epoch ended."""

    number: int
    voted_s: float
    """Time just before this rank filled its ballot."""
    awaited_s: float
    """Time at which this rank began to wait for the other ranks' ballots."""
    ended_s: float


class OperationBegan(Record, frozen=True):
    """An operation began on every rank, by a command or a verdict."""

    operation: int
    kind: str
    request: str
    """The request that the operation belongs to; empty if none."""
    phase: str
    at_s: float


class OperationMoved(Record, frozen=True):
    """An operation entered a phase. An operation can enter the same phase more than once."""

    operation: int
    phase: str
    at_s: float


class OperationEnded(Record, frozen=True):
    """An operation finished on every rank."""

    operation: int
    kind: str
    outcome: str
    at_s: float


class RequestAdmitted(Record, frozen=True):
    """A request was admitted, with the number of cached tokens by tier."""

    request: str
    tokens: int
    """Number of tokens that the request asked the cache for, cached or not."""
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    at_s: float


class RequestReleased(Record, frozen=True):
    """The engine released a request."""

    request: str
    at_s: float


class PagesCopied(Record, frozen=True):
    """A copy between device and host finished on this rank, successfully or not."""

    operation: int
    direction: Direction
    pages: int
    nbytes: int
    """Bytes copied; 0 if the copy failed."""
    ok: bool
    began_s: float
    """Time at which the copy itself started, which may be long after its order."""
    ended_s: float


class StoreCalled(Record, frozen=True):
    """A call of this rank to a store returned."""

    store: str
    """The kind of store: the names of the URI's wrappers, followed by its scheme."""
    call: str
    operation: int
    pool: str
    outcomes: dict[str, int]
    """Number of keys by outcome, named as in `CallMetrics.outcomes`; `interrupted` if the call was cut
    off before the outcome was known."""
    nbytes: int
    """Bytes read or written for keys with outcome OK."""
    began_s: float
    ended_s: float


TimedEvent = (
    StepHalf
    | RoundHeld
    | OperationBegan
    | OperationMoved
    | OperationEnded
    | RequestAdmitted
    | RequestReleased
    | PagesCopied
    | StoreCalled
)

Timeline = Callable[[TimedEvent], None]
"""Callback that receives each timed event of a rank, from any thread. Must neither block nor raise."""
