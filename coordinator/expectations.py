"""Expectations: the operations whose progress a ballot tracks, their lanes, and agreed outcomes.

The replica emits expectations, and the ballot applies them in that order. Nothing flows back.
"""

from .codec import Record
from .operation import Phase, Queue


class SlotAssigned(Record, frozen=True):
    """A prefetch slot carries `operation` from now on; phase and bound define its lanes."""

    operation: int
    prefetch_slot: int
    phase: Phase
    bound: int


class SlotFreed(Record, frozen=True):
    """The prefetch slot of `operation` no longer carries a vote."""

    operation: int


class Queued(Record, frozen=True):
    """`operation` was appended to a watermark queue."""

    queue: Queue
    queue_index: int
    operation: int


class Settled(Record, frozen=True):
    """All ranks agreed on the outcome of the queue's tickets up to `queue_index`."""

    queue: Queue
    queue_index: int


class Forgotten(Record, frozen=True):
    """`operation` has finished; its progress is dropped."""

    operation: int


Expectation = SlotAssigned | SlotFreed | Queued | Settled | Forgotten
