"""How long things took, in a bounded number of numbers, whatever happens."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

_STEPS: Final = (1.0, 2.5, 5.0)
BOUNDS_S: Final = tuple(step * 10.0**power for power in range(-5, 2) for step in _STEPS)
"""The upper bounds of the buckets: 10 us to 50 s; what takes longer has a bucket too."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often something was done, by how long it took."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    """One count for each of `BOUNDS_S`, of what took no longer than that and longer than the bound
    before, and one for what took longer than all."""
    sum_s: float = 0.0

    def since(self, before: "Histogram") -> "Histogram":
        """Return what has been added to an earlier state of the same histogram."""
        counts = tuple(now - old for now, old in zip(self.counts, before.counts, strict=True))
        return Histogram(counts, self.sum_s - before.sum_s)


class Latencies:
    """Counts how long things took. One thread adds; any thread may look."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, took_s: float) -> None:
        """Count one more."""
        self._counts[bisect_left(BOUNDS_S, took_s)] += 1
        self._sum_s += took_s

    def histogram(self) -> Histogram:
        """Return what was counted so far."""
        return Histogram(tuple(self._counts), self._sum_s)
