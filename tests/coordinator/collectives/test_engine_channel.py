"""An engine's result channel as transport: a round completes once the last rank's ballot arrives."""

from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.collective import Vector
from lockstep.coordinator.collectives.engine_channel import EngineChannel, FoldedBallots
from lockstep.coordinator.lanes import ROUND
from lockstep.errors import CollectiveTimeout, InternalError, PeerLost, UsageError
from tests.kit.collectives.contract import LANES, random_lanes


def header(number: int) -> Vector:
    """Return the lanes with which the scheduler's process launches a round."""
    lanes: Vector = np.zeros(LANES, dtype=np.int64)
    lanes[ROUND] = number
    return lanes


def ballot(rank: int, number: int) -> FoldedBallots:
    return FoldedBallots(number, 1 << rank, header(number))


@given(ranks=st.permutations(range(4)), seed=st.integers(0, 1 << 30))
def test_a_round_is_the_minimum_in_whatever_order_ballots_are_folded(
    ranks: list[int], seed: int
) -> None:
    """Rule R1: every transport returns the vector of a local fold, whatever the order of ballots."""
    rng, channel = np.random.default_rng(seed), EngineChannel(len(ranks))
    vectors = [random_lanes(rng, LANES) for _ in ranks]
    channel.launch(header(1))

    channel.deliver(
        reduce(FoldedBallots.joined, (FoldedBallots(1, 1 << each, vectors[each]) for each in ranks))
    )

    assert channel.wait(0.0).tolist() == np.minimum.reduce(vectors).tolist()


def test_a_round_is_answered_once_every_rank_s_ballot_is_in_it() -> None:
    channel = EngineChannel(2)
    flags = [channel.answered]
    channel.launch(header(1))
    flags.append(channel.answered)
    channel.deliver(ballot(1, 1))
    flags += [channel.answered, channel.must_repeat]
    channel.deliver(ballot(0, 1).joined(ballot(1, 1)))
    flags += [channel.answered, channel.must_repeat]

    assert flags == [True, False, False, True, True, False]
    assert channel.wait(0.0).tolist() == header(1).tolist()


def test_ballots_of_a_round_that_is_over_change_nothing() -> None:
    channel = EngineChannel(1)
    channel.launch(header(1))
    channel.deliver(ballot(0, 1))
    channel.wait(0.0)
    channel.launch(header(2))

    channel.deliver(ballot(0, 1))

    assert not channel.answered


def deliver_too_early(channel: EngineChannel) -> None:
    channel.deliver(ballot(0, 2))


def wait_too_early(channel: EngineChannel) -> None:
    channel.wait(0.0)


def gather(channel: EngineChannel) -> None:
    channel.gather(b"", 1.0)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (deliver_too_early, InternalError),
        (wait_too_early, CollectiveTimeout),
        (gather, UsageError),
    ],
)
def test_what_cannot_be_is_refused(
    call: Callable[[EngineChannel], None], error: type[Exception]
) -> None:
    channel = EngineChannel(1)
    channel.launch(header(1))

    with pytest.raises(error):
        call(channel)


def test_ballots_of_two_rounds_are_never_folded() -> None:
    with pytest.raises(InternalError, match="ranks 0 voted in round 1 and ranks 1 in round 2"):
        ballot(0, 1).joined(ballot(1, 2))


def test_once_it_is_closed_no_round_is_launched_or_waited_for() -> None:
    channel = EngineChannel(1)
    channel.launch(header(1))
    channel.close()

    with pytest.raises(PeerLost):
        channel.wait(0.0)
    with pytest.raises(PeerLost):
        channel.launch(header(2))
