"""Expectations: the operations whose progress a ballot tracks, their lanes, and agreed outcomes.

The replica emits expectations, and the ballot applies them in that order. Nothing flows back.
"""

from .codec import Record
from .operation import Phase, Queue


class Seated(Record, frozen=True):
    """From now on prefetch slot `seat` carries `operation`; phase and bound define its lanes."""

    operation: int
    seat: int
    phase: Phase
    bound: int


class Unseated(Record, frozen=True):
    """The prefetch slot of `operation` no longer carries a vote."""

    operation: int


class Queued(Record, frozen=True):
    """`operation` was appended to a watermark queue."""

    queue: Queue
    ticket: int
    operation: int


class Settled(Record, frozen=True):
    """All ranks agreed on the outcome of the queue's tickets up to `ticket`."""

    queue: Queue
    ticket: int


class Forgotten(Record, frozen=True):
    """`operation` has finished; its progress is dropped."""

    operation: int


Expectation = Seated | Unseated | Queued | Settled | Forgotten
