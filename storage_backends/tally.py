"""Counting outcomes, the same way in every backend."""

from collections import Counter
from collections.abc import Sequence

from .base import Counters, Read, ReadOutcome, Write, WriteOutcome


class Tally:
    """Counts what became of reads and writes. One owner: the event loop's thread."""

    def __init__(self) -> None:
        self._reads: Counter[ReadOutcome] = Counter()
        self._writes: Counter[WriteOutcome] = Counter()
        self._bytes_read = 0
        self._bytes_written = 0

    def reads(self, reads: Sequence[Read], outcomes: list[ReadOutcome]) -> list[ReadOutcome]:
        """Count the outcomes of one call, and return them."""
        ok = ReadOutcome.OK
        done = outcomes.count(ok)
        self._reads[ok] += done
        if done == len(outcomes):
            self._bytes_read += sum([read.shape.nbytes for read in reads])
            return outcomes
        for read, outcome in zip(reads, outcomes, strict=True):
            if outcome is ok:
                self._bytes_read += read.shape.nbytes
            else:
                self._reads[outcome] += 1
        return outcomes

    def writes(self, writes: Sequence[Write], outcomes: list[WriteOutcome]) -> list[WriteOutcome]:
        """Count the outcomes of one call, and return them."""
        ok = WriteOutcome.OK
        done = outcomes.count(ok)
        self._writes[ok] += done
        if done == len(outcomes):
            self._bytes_written += sum([write.shape.nbytes for write in writes])
            return outcomes
        for write, outcome in zip(writes, outcomes, strict=True):
            if outcome is ok:
                self._bytes_written += write.shape.nbytes
            else:
                self._writes[outcome] += 1
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
