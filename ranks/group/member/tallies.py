"""Tallies: statistics that the notices of a replica add up to, the same on every rank."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ....coordinator.operation import Kind, Outcome
from ...protocol.notices import (
    Finished,
    Hit,
    Lacking,
    Missed,
    NotBegun,
    Notice,
    Quarantined,
    Removed,
    Reset,
    StoreChanged,
    Stored,
)

Counts = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Statistics of the replica since the cache was opened; equal on all ranks."""

    operations: Counts
    """How many operations of each kind ended in each way. `no_room` counts what was not begun, too."""
    admissions: int
    """How often a request was admitted."""
    asked_tokens: int
    """How many tokens admitted requests could have used from the cache."""
    hit_tokens: dict[str, int]
    """How many of those were cached, by the tier on which they were."""
    missed_pages: dict[str, int]
    """Pages that prefetches asked for and did not bring, by reason."""
    stored_pages: Counts
    """Pages that came to a tier, by cause."""
    removed_pages: Counts
    """Pages that left a tier, by cause."""
    lacking: dict[int, int]
    """How often a rank could not do what the others could have done."""
    quarantined: int
    """Operations that did not fall quiet in time."""


@dataclass(slots=True)
class Tallies:
    """Folds notices, each once, in their order."""

    admissions: int = 0
    asked_tokens: int = 0
    quarantined: int = 0
    _operations: Counter[tuple[Kind, Outcome]] = field(
        default_factory=Counter[tuple[Kind, Outcome]]
    )
    _hits: Counter[str] = field(default_factory=Counter[str])
    _missed: Counter[str] = field(default_factory=Counter[str])
    _stored: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _removed: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _lacking: Counter[int] = field(default_factory=Counter[int])

    def fold(self, notices: Sequence[Notice]) -> None:
        """Count what has happened."""
        folded = self._folded
        for notice in notices:
            folded[type(notice)](self, notice)

    def _stored_more(self, notice: Stored) -> None:
        self._stored[notice.tier, notice.cause] += notice.pages

    def _removed_more(self, notice: Removed) -> None:
        self._removed[notice.tier, notice.cause] += notice.pages

    def _finished_one(self, notice: Finished) -> None:
        self._operations[notice.kind, notice.outcome] += 1

    def _not_begun(self, notice: NotBegun) -> None:
        self._operations[notice.kind, Outcome.NO_ROOM] += 1

    def _hit(self, notice: Hit) -> None:
        self.admissions += 1
        self.asked_tokens += notice.tokens
        self._hits["device"] += notice.device_tokens
        self._hits["host"] += notice.host_tokens
        self._hits["storage"] += notice.storage_tokens

    def _missed_more(self, notice: Missed) -> None:
        self._missed[notice.why] += notice.pages

    def _lacks(self, notice: Lacking) -> None:
        if notice.rank is not None:
            self._lacking[notice.rank] += 1

    def _set_apart(self, notice: Quarantined) -> None:
        del notice
        self.quarantined += 1

    def _changed(self, notice: StoreChanged | Reset) -> None:
        """Count nothing: such a notice says what is there now, and adds up to nothing."""

    _folded: ClassVar[dict[type[Notice], Callable[["Tallies", Any], None]]] = {
        Stored: _stored_more,
        Removed: _removed_more,
        Finished: _finished_one,
        NotBegun: _not_begun,
        Hit: _hit,
        Missed: _missed_more,
        Lacking: _lacks,
        Quarantined: _set_apart,
        StoreChanged: _changed,
        Reset: _changed,
    }

    def stats(self) -> ReplicaStats:
        """Return what has been counted so far. Any thread may ask."""
        return ReplicaStats(
            operations=_by_two(
                Counter(
                    {
                        (kind.word.lower(), outcome.word.lower()): count
                        for (kind, outcome), count in dict(self._operations).items()
                    }
                )
            ),
            admissions=self.admissions,
            asked_tokens=self.asked_tokens,
            hit_tokens=dict(self._hits),
            missed_pages=dict(self._missed),
            stored_pages=_by_two(self._stored),
            removed_pages=_by_two(self._removed),
            lacking=dict(self._lacking),
            quarantined=self.quarantined,
        )


def _by_two(counter: Counter[tuple[str, str]]) -> Counts:
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    # The engine's thread may go on counting: to copy a dictionary is one step to it.
    for (first, second), count in sorted(dict(counter).items()):
        counts[str(first)][str(second)] = count
    return dict(counts)
