"""Aligns the clocks of ranks on several hosts, using the times of their rounds.

A rank votes before any rank has the verdict of the same round. Each round thus bounds the difference of
two clocks from both sides, and the shortest round gives the tightest bound. The alignment needs no
extra messages, works for interrupted runs, and follows clock drift.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ..ranks.protocol.timed_events import RoundHeld
from .kept_events import RankEvents

WINDOW_S: Final = 5.0
"""The length of a time window in seconds. Of each window, only the shortest round is used."""
DRIFT_MAX: Final = 1e-4
"""The assumed maximum drift between two clocks, in seconds per second."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """The conversion from one clock's times to a reference clock's."""

    how: str
    moments: tuple[tuple[float, float], ...] = ()
    """(time, lead) pairs at which the clocks were compared. Lead is this clock minus the reference
    clock, in seconds.

    The lead is interpolated linearly between pairs. Empty if both are the same clock.
    """
    error_s: float | None = 0.0
    """The maximum error of the conversion in seconds; None if unknown.

    The error is half the uncertainty of the least certain comparison, plus the drift over the longest
    gap between comparisons.
    """

    def on_reference(self, at_s: float) -> float:
        """Convert a time of this clock to the reference clock."""
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
    """Return, for each clock by its id, the conversion to the clock of the first rank.

    A clock whose ranks share no round with the first rank is aligned by the hosts' wall clocks.
    """
    known: dict[str, Alignment] = {}
    for each in ranks:
        if each.clock not in known:
            known[each.clock] = _by_rounds(ranks[0], each) if known else SAME
    return known


def _by_rounds(first: RankEvents, other: RankEvents) -> Alignment:
    """Return the conversion of another rank's clock, found from rounds that both ranks recorded."""
    compared = sorted(_compared(first, other))
    if not compared:
        ahead_s = first.wall_s - other.wall_s
        return Alignment("the hosts' wall clocks", ((0.0, ahead_s),), None)
    began_s, took_s = compared[0][0], compared[-1][0] - compared[0][0]
    # Merge the last, incomplete time window into the window before it, because an incomplete window
    # would have too few rounds.
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
    """Yield (time, lead, uncertainty) of the other clock for each round that both ranks recorded."""
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
