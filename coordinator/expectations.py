"""Expectations: whose progress a ballot notes, in which lanes it shows, and what is agreed.

Plain data. The replica says these things in an order in which they hold, and the ballot follows them
in that order; it is never asked for anything.
"""

from typing import NamedTuple

from .operation import Phase, Queue


class Seated(NamedTuple):
    """The lanes of `seat` speak of `operation` from now on; phase and bound say what they mean."""

    operation: int
    seat: int
    phase: Phase
    bound: int


class Unseated(NamedTuple):
    """The seat of `operation` says nothing any more."""

    operation: int


class Queued(NamedTuple):
    """`operation` stands at the end of a watermark queue."""

    queue: Queue
    ticket: int
    operation: int


class Settled(NamedTuple):
    """The outcome of the queue's tickets up to `ticket` is agreed."""

    queue: Queue
    ticket: int


class Forgotten(NamedTuple):
    """`operation` has ended, and nothing that was seen of it counts any more."""

    operation: int


Expectation = Seated | Unseated | Queued | Settled | Forgotten
