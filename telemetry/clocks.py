"""One clock for ranks on several hosts: their rounds say how far their clocks are apart.

A rank votes before any rank has the verdict of the same round. So each round bounds the difference of
two clocks from both sides, and the shortest one bounds it best. Nobody has to exchange anything else,
an interrupted run is aligned as well as one that has ended, and clocks that drift are followed.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ..ranks.protocol.timed_events import RoundHeld
from .kept_events import RankEvents

WINDOW_S: Final = 5.0
"""Of so much time the shortest round counts."""
DRIFT_MAX: Final = 1e-4
"""What clocks are taken to gain or lose on each other at most, in between."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How to read a time of one clock on another."""

    how: str
    moments: tuple[tuple[float, float], ...] = ()
    """When the clocks were compared, and by how much this one was ahead then; in between the difference
    is taken to grow or shrink evenly. None where it is the same clock."""
    error_s: float | None = 0.0
    """How far off it can be: half of the widest of these comparisons, and what clocks drift apart in
    the longest time between two of them. None where nobody knows."""

    def on_reference(self, at_s: float) -> float:
        """Return what the other clock showed at a time of this one."""
        moments = self.moments
        if not moments:
            return at_s
        after = bisect_left(moments, (at_s,))
        if after in (0, len(moments)):
            return at_s - moments[min(after, len(moments) - 1)][1]
        (from_s, ahead_s), (to_s, later_s) = moments[after - 1], moments[after]
        share = (at_s - from_s) / (to_s - from_s)
        return at_s - ahead_s - share * (later_s - ahead_s)


SAME: Final = Alignment("the same clock")


def align(ranks: Sequence[RankEvents]) -> dict[str, Alignment]:
    """Return how to read each clock on that of the first rank, by its name.

    A clock that no round compares with it is read by the wall clocks of the hosts.
    """
    known: dict[str, Alignment] = {}
    for each in ranks:
        if each.clock not in known:
            known[each.clock] = _by_rounds(ranks[0], each) if known else SAME
    return known


def _by_rounds(first: RankEvents, other: RankEvents) -> Alignment:
    """Return how to read another rank's clock by the rounds that it had with the first."""
    compared = sorted(_compared(first, other))
    if not compared:
        ahead_s = first.wall_s - other.wall_s
        return Alignment("the hosts' wall clocks", ((0.0, ahead_s),), None)
    began_s, took_s = compared[0][0], compared[-1][0] - compared[0][0]
    # What is left over belongs to the last one: few rounds would say little.
    last = max(0, int(took_s / WINDOW_S) - 1)
    best: dict[int, tuple[float, float, float]] = {}
    for each in compared:
        window = min(last, int((each[0] - began_s) / WINDOW_S))
        if window not in best or each[2] < best[window][2]:
            best[window] = each
    chosen = list(best.values())
    moments = tuple((at_s, ahead_s) for at_s, ahead_s, _ in chosen)
    ends = (began_s, *(at_s for at_s, _ in moments), began_s + took_s)
    apart_s = max(later - earlier for earlier, later in pairwise(ends))
    width_s = max(width_s for _, _, width_s in chosen)
    return Alignment("the rounds", moments, width_s / 2 + DRIFT_MAX * apart_s)


def _compared(first: RankEvents, other: RankEvents) -> Iterator[tuple[float, float, float]]:
    """Yield for each round a time of the other's clock, how far it was ahead, within what width."""
    rounds = _rounds(first)
    for number, (voted_s, ended_s) in _rounds(other).items():
        if number in rounds:
            mine = rounds[number]
            at_least, at_most = voted_s - mine[1], ended_s - mine[0]
            yield (voted_s + ended_s) / 2, (at_least + at_most) / 2, at_most - at_least


def _rounds(rank: RankEvents) -> Mapping[int, tuple[float, float]]:
    return {
        each.number: (each.voted_s, each.ended_s)
        for each in rank.events
        if isinstance(each, RoundHeld)
    }
