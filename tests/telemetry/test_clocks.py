"""Clocks of several hosts are aligned by their rounds, with a stated bound on the error."""

import random

import pytest

from lockstep.ranks.protocol.timed_events import RoundHeld
from lockstep.telemetry.clocks import Alignment, align
from lockstep.telemetry.kept_events import RankEvents

ROUNDS = 4000
DRIFT = 40e-6
"""Relative drift of a computer's clock."""
AHEAD_S = 1e6


def slow_clock(at_s: float) -> float:
    """Return the reading of another host's clock, which is ahead and drifts."""
    return AHEAD_S + at_s * (1 + DRIFT)


def rank(number: int, clock: str, events: list[RoundHeld], wall_s: float = 0.0) -> RankEvents:
    return RankEvents(rank=number, clock=clock, wall_s=wall_s, left_out=0, events=events)


def two_hosts(seed: int, *, step_s: float = 0.01) -> tuple[RankEvents, RankEvents]:
    """Return the events of two ranks' rounds, with random delays of both ranks and of the network."""
    draw = random.Random(seed)
    mine: list[RoundHeld] = []
    theirs: list[RoundHeld] = []
    for number in range(1, ROUNDS + 1):
        votes = [number * step_s + draw.expovariate(1 / 0.001) for _ in range(2)]
        ends = [max(votes) + 50e-6 + draw.expovariate(1 / 0.0005) for _ in range(2)]
        mine.append(RoundHeld(number, votes[0], votes[0], ends[0]))
        vote, end = slow_clock(votes[1]), slow_clock(ends[1])
        theirs.append(RoundHeld(number, vote, vote, end))
    return rank(0, "a", mine), rank(1, "b", theirs)


def worst_error_s(alignment: Alignment, last_s: float) -> float:
    moments = [last_s * share / 100 for share in range(101)]
    return max(abs(alignment.on_reference(slow_clock(at_s)) - at_s) for at_s in moments)


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_drifts_is_read_within_the_error_that_is_stated(seed: int) -> None:
    alignment = align(two_hosts(seed))["b"]

    assert alignment.how == "the rounds"
    assert alignment.error_s is not None
    assert worst_error_s(alignment, ROUNDS * 0.01) <= alignment.error_s
    assert alignment.error_s < 0.002


def test_a_rank_on_the_clock_of_another_is_read_as_that_one_is() -> None:
    first, second = two_hosts(1)
    beside = rank(2, "b", [])

    alignments = align([first, second, beside])

    assert sorted(alignments) == ["a", "b"]
    assert alignments["a"].on_reference(17.0) == 17.0


def test_a_rank_that_has_no_round_with_the_first_is_read_by_the_wall_clocks() -> None:
    first = rank(0, "a", [], wall_s=100.0)
    other = rank(1, "b", [], wall_s=40.0)

    alignment = align([first, other])["b"]

    assert alignment.on_reference(75.0) == 15.0
    assert alignment.how == "the hosts' wall clocks"
    assert alignment.error_s is None
