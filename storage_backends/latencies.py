"""Histograms of durations, with a fixed number of buckets."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

_STEPS: Final = (1.0, 2.5, 5.0)
BOUNDS_S: Final = tuple(step * 10.0**power for power in range(-5, 2) for step in _STEPS)
"""Upper bounds of the buckets in seconds, from 10 us to 50 s. One more bucket counts longer durations.
"""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of durations."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    """Number of durations per bucket. Each bucket counts durations up to its bound in `BOUNDS_S` and
    above the previous bound. The last bucket counts durations above all bounds."""
    sum_s: float = 0.0

    def since(self, before: "Histogram") -> "Histogram":
        """Return a histogram of the durations that were added after the earlier histogram `before`."""
        counts = tuple(now - old for now, old in zip(self.counts, before.counts, strict=True))
        return Histogram(counts, self.sum_s - before.sum_s)


class Latencies:
    """Counts durations in a histogram. One thread adds; any thread may read."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, took_s: float) -> None:
        """Add one duration to the histogram."""
        self._counts[bisect_left(BOUNDS_S, took_s)] += 1
        self._sum_s += took_s

    def histogram(self) -> Histogram:
        """Return the histogram of the durations added up to now."""
        return Histogram(tuple(self._counts), self._sum_s)
