"""Expectations: the replica's instructions to the ballot on which operations to track.

The ballot applies expectations in the sequence in which the replica emits them. The ballot returns
nothing to the replica.
"""

from .codec import Record
from .operation import Phase, Queue


class SlotAssigned(Record, frozen=True):
    """Expectation: `operation` has this prefetch slot; phase and bound define the slot's lanes."""

    operation: int
    prefetch_slot: int
    phase: Phase
    bound: int


class SlotFreed(Record, frozen=True):
    """Expectation: `operation` no longer has a prefetch slot."""

    operation: int


class Queued(Record, frozen=True):
    """Expectation: `operation` was appended to a watermark queue."""

    queue: Queue
    queue_index: int
    operation: int


class Settled(Record, frozen=True):
    """Expectation: all ranks agreed on the outcome of the queue's operations up to `queue_index`."""

    queue: Queue
    queue_index: int


class Forgotten(Record, frozen=True):
    """Expectation: `operation` has finished; the ballot drops its progress."""

    operation: int


Expectation = SlotAssigned | SlotFreed | Queued | Settled | Forgotten
