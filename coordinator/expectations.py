"""Expectations: whose progress a ballot notes, in which lanes it shows, and what is agreed.

Plain data. The replica says these things in an order in which they hold, and the ballot follows them
in that order; it is never asked for anything.
"""

from .codec import Record
from .operation import Phase, Queue


class Seated(Record, frozen=True):
    """The lanes of `seat` speak of `operation` from now on; phase and bound say what they mean."""

    operation: int
    seat: int
    phase: Phase
    bound: int


class Unseated(Record, frozen=True):
    """The seat of `operation` says nothing any more."""

    operation: int


class Queued(Record, frozen=True):
    """`operation` stands at the end of a watermark queue."""

    queue: Queue
    ticket: int
    operation: int


class Settled(Record, frozen=True):
    """The outcome of the queue's tickets up to `ticket` is agreed."""

    queue: Queue
    ticket: int


class Forgotten(Record, frozen=True):
    """`operation` has ended, and nothing that was seen of it counts any more."""

    operation: int


Expectation = Seated | Unseated | Queued | Settled | Forgotten
