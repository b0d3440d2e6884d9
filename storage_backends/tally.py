"""Counting outcomes, the same way in every backend."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from .base import Counters, Read, ReadOutcome, Write, WriteOutcome

Outcome = TypeVar("Outcome", ReadOutcome, WriteOutcome)


class Tally:
    """Counts what became of reads and writes. One owner: the event loop's thread."""

    def __init__(self) -> None:
        self._reads: Counter[ReadOutcome] = Counter()
        self._writes: Counter[WriteOutcome] = Counter()
        self._bytes_read = 0
        self._bytes_written = 0

    def reads(self, reads: Sequence[Read], outcomes: list[ReadOutcome]) -> list[ReadOutcome]:
        """Count the outcomes of one call, and return them."""
        self._bytes_read += _count(self._reads, reads, outcomes, ReadOutcome.OK)
        return outcomes

    def writes(self, writes: Sequence[Write], outcomes: list[WriteOutcome]) -> list[WriteOutcome]:
        """Count the outcomes of one call, and return them."""
        self._bytes_written += _count(self._writes, writes, outcomes, WriteOutcome.OK)
        return outcomes

    def counters(self) -> Counters:
        """Return the counts so far."""
        reads, writes = self._reads, self._writes
        return Counters(
            reads_ok=reads[ReadOutcome.OK],
            reads_missing=reads[ReadOutcome.MISSING],
            reads_corrupt=reads[ReadOutcome.CORRUPT],
            reads_lacking=reads[ReadOutcome.LACKING],
            reads_failed=reads[ReadOutcome.FAILED],
            reads_timed_out=reads[ReadOutcome.TIMED_OUT],
            writes_ok=writes[WriteOutcome.OK],
            writes_present=writes[WriteOutcome.PRESENT],
            writes_failed=writes[WriteOutcome.FAILED],
            writes_timed_out=writes[WriteOutcome.TIMED_OUT],
            bytes_read=self._bytes_read,
            bytes_written=self._bytes_written,
        )


def _count(
    counts: Counter[Outcome], keys: Sequence[Read | Write], outcomes: list[Outcome], ok: Outcome
) -> int:
    """Count the outcomes, and return how many bytes the keys have that are OK."""
    done = outcomes.count(ok)
    counts[ok] += done
    # Nearly always all are OK, and none has to be looked at by itself.
    if done == len(outcomes):
        return sum([key.shape.nbytes for key in keys])
    counts.update(outcome for outcome in outcomes if outcome is not ok)
    each = zip(keys, outcomes, strict=True)
    return sum(key.shape.nbytes for key, outcome in each if outcome is ok)
