"""Changes of a group's metrics between two readings."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from ...telemetry.families import PREFIX
from .group_sample import GroupSample, Key, Numbers, label_of


@dataclass(frozen=True, slots=True)
class Window:
    """The time between two readings, or since the cache was opened if `before` is None.

    Metrics are named without their common prefix. A counter that is equal on all ranks is read from one
    rank; other counters are summed over the ranks that are in both readings.
    """

    now: GroupSample
    before: GroupSample | None = None

    @property
    def seconds(self) -> float:
        """Seconds between the two readings; 0.0 if `before` is None."""
        return 0.0 if self.before is None else self.now.at_s - self.before.at_s

    def grew(self, name: str, **labels: str) -> float:
        """Return the increase of a counter that is equal on all ranks."""
        return next((grown for _, grown in self._by_rank(name, labels)), 0.0)

    def grew_by_rank(self, name: str, **labels: str) -> dict[int, float]:
        """Return the increase of a counter, by rank."""
        return dict(self._by_rank(name, labels))

    def grew_on_every_rank(self, name: str, **labels: str) -> float:
        """Return the increase of a counter, summed over all ranks."""
        return sum(grown for _, grown in self._by_rank(name, labels))

    def waits(self) -> dict[int, float]:
        """Return, by rank, the seconds that the rank has waited for the others in rounds."""
        name, now = "round_wait_seconds_total", self.now.ranks
        return {rank: s for rank, s in self._by_rank(name, {}) if any(_keys(now[rank], name))}

    def _by_rank(self, name: str, labels: dict[str, str]) -> Iterator[tuple[int, float]]:
        """Yield (rank, increase of a counter) for each rank that is in both readings."""
        before = None if self.before is None else self.before.ranks
        for rank, numbers in sorted(self.now.ranks.items(), key=itemgetter(0)):
            if before is None:
                yield rank, _sum(numbers, name, labels)
            elif rank in before:
                yield rank, _sum(numbers, name, labels) - _sum(before[rank], name, labels)

    def is_at(self, name: str, **labels: str) -> float:
        """Return the current value of a gauge that is equal on all ranks."""
        return _sum(self.now.any_rank, name, labels)

    def is_at_on_every_rank(self, name: str, **labels: str) -> float:
        """Return the current value of a gauge, summed over all ranks."""
        return sum(_sum(numbers, name, labels) for numbers in self.now.ranks.values())

    def values_of(self, name: str, label: str) -> list[str]:
        """Return all values that a label of a metric has, sorted."""
        return sorted(
            {label_of(key, label) for key in self.now.any_rank if key[0] == PREFIX + name}
        )

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the increase of a counter that is equal on all ranks, by the values of `label`."""
        values = self.values_of(name, label)
        grown = {each: self.grew(name, **{**labels, label: each}) for each in values}
        return {each: count for each, count in grown.items() if count}

    def percentile(self, name: str, share: float, **labels: str) -> float | None:
        """Return a quantile of a histogram's new entries, as an upper bound in seconds.

        `share` is the quantile, such as 0.5. The entries are summed over all ranks. Returns None if
        there are no new entries, and infinity if the quantile exceeds the last bucket's bound.
        """
        bounds: dict[float, float] = {}
        for text in {label_of(key, "le") for key in _keys(self.now.any_rank, f"{name}_bucket")}:
            bounds[float(text)] = self.grew_on_every_rank(
                f"{name}_bucket", **{**labels, "le": text}
            )
        total = max(bounds.values(), default=0.0)
        if not total:
            return None
        return min(bound for bound, count in bounds.items() if count >= share * total)


def _keys(numbers: Numbers, name: str) -> Iterator[Key]:
    return (key for key in numbers if key[0] == PREFIX + name)


def _sum(numbers: Numbers, name: str, labels: dict[str, str]) -> float:
    wanted = labels.items()
    return sum(numbers[key] for key in _keys(numbers, name) if wanted <= dict(key[1]).items())
