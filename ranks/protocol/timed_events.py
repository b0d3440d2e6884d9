"""Timed events: what takes time on one rank, for whoever draws it or measures it.

All times are seconds of `time.monotonic`, which the processes of one host share. What has two ends is
one event, told at its second end; an operation, which may outlive whoever looks, is told at each of its
ends. None of this is made unless a cache is opened with somebody who wants it.
"""

from collections.abc import Callable
from typing import Final

from ...coordinator.codec import Record
from .orders import Direction

WAYS: Final = {
    Direction.TO_HOST: ("device", "host"),
    Direction.TO_DEVICE: ("host", "device"),
}
"""From which tier to which each copy goes."""


class StepHalf(Record, frozen=True):
    """The cache kept the engine's thread, for one half of a step."""

    step: int
    launches: bool
    """Whether it is the half that launches the step's round. The other one applies a verdict."""
    began_s: float
    ended_s: float


class RoundHeld(Record, frozen=True):
    """A round is over on this rank: it has the verdict, or the epoch has ended."""

    number: int
    voted_s: float
    """When this rank was about to vote."""
    awaited_s: float
    """When it began to wait for the others."""
    ended_s: float


class OperationBegan(Record, frozen=True):
    """An operation began on every rank, in a command or by a verdict."""

    operation: int
    kind: str
    request: str
    """Whose it is; empty where it is nobody's."""
    phase: str
    at_s: float


class OperationMoved(Record, frozen=True):
    """An operation is in a phase, which it may have been in before."""

    operation: int
    phase: str
    at_s: float


class OperationEnded(Record, frozen=True):
    """An operation has ended on every rank."""

    operation: int
    kind: str
    outcome: str
    at_s: float


class RequestAdmitted(Record, frozen=True):
    """A request was admitted with what was cached of its tokens, by the tier on which that was."""

    request: str
    tokens: int
    """How many it could have used."""
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    at_s: float


class RequestReleased(Record, frozen=True):
    """The engine has let go of a request."""

    request: str
    at_s: float


class PagesCopied(Record, frozen=True):
    """This rank has copied pages between its tiers, or tried to."""

    operation: int
    direction: Direction
    pages: int
    nbytes: int
    """Bytes that were copied; 0 unless it went well."""
    ok: bool
    began_s: float
    """When the copying itself began, which may be long after it was ordered."""
    ended_s: float


class StoreCalled(Record, frozen=True):
    """A call of this rank's to a store has returned."""

    store: str
    """The kind of store: its URI's scheme with the wrappers before it."""
    call: str
    operation: int
    """For which operation."""
    pool: str
    """Of which pool its keys are."""
    outcomes: dict[str, int]
    """Keys by what became of them, as `CallMetrics.outcomes`; `interrupted` where nobody knows."""
    nbytes: int
    """Bytes of the keys that were OK."""
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
"""Told each event of one rank when it is over, from any thread; must neither wait nor raise."""
