"""An engine's own channel keeps those clauses of the contract that are its to keep.

Ranks are threads that hand their ballots to the engine, as workers do; it brings a round's at once.
"""

import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from lockstep.coordinator.collective import Vector
from lockstep.coordinator.collectives.engine_channel import EngineChannel, FoldedBallots
from lockstep.coordinator.lanes import ROUND
from lockstep.errors import CollectiveTimeout, InternalError, PeerLost, UsageError
from tests.kit.collectives.contract import LANES, CollectiveContract, Program

EXEMPT = {
    "test_gather_returns_payloads_of_any_length_by_rank": "workers compare all when they open",
    "test_launches_count_rounds_and_not_gatherings": "there are no gatherings",
    "test_a_rank_that_does_not_come_is_a_timeout_within_the_deadline": "the engine's deadline holds",
    "test_when_a_rank_leaves_the_news_reaches_all_others_promptly": "the engine ends with a worker",
    "test_a_rank_that_leaves_while_its_round_is_pending_is_not_held": "nobody waits in it",
    "test_close_may_be_called_twice_and_every_call_after_it_raises": "only the decider's end closes",
    "test_after_an_error_every_call_raises_it_at_once": "a round that is not here is no error yet",
}
"""The clauses of the contract that an engine keeps in its place, each with the reason."""


class Brought:
    """The engine: it folds what its workers return, and brings it to the decider."""

    def __init__(self, world_size: int) -> None:
        self.channel = EngineChannel(world_size)
        self.folded: dict[int, Vector] = {}
        self.changed = threading.Condition()
        self._coming: dict[int, FoldedBallots] = {}

    def bring(self, ballot: FoldedBallots) -> None:
        """Add one worker's ballot; the last one completes the round."""
        with self.changed:
            other = self._coming.get(ballot.round)
            joined = ballot if other is None else other.joined(ballot)
            self._coming[ballot.round] = joined
            if joined.ranks == (1 << self.channel.world_size) - 1:
                self.channel.launch(header(ballot.round))
                self.channel.deliver(joined)
                self.folded[ballot.round] = self.channel.wait(0.0)
                self.changed.notify_all()


class Worker:
    """One rank's end: what it launches goes with the outputs of its step."""

    def __init__(self, engine: Brought, rank: int) -> None:
        self.rank, self.world_size = rank, engine.channel.world_size
        self.launches = 0
        self._engine = engine

    def launch(self, lanes: Vector) -> "Worker":
        self.launches += 1
        self._engine.bring(FoldedBallots.of(self.rank, self.launches, lanes))
        return self

    def wait(self, timeout_s: float) -> Vector:
        number = self.launches
        with self._engine.changed:
            self._engine.changed.wait_for(lambda: number in self._engine.folded, timeout_s)
            return self._engine.folded[number]


class RanksOfAnEngine:
    """Runs programs in threads, a worker each."""

    def run(self, program: Program, world_size: int, *, late: Collection[int] = ()) -> list[Any]:
        engine = Brought(world_size)
        came: list[Any] = [None] * world_size

        def work(rank: int) -> None:
            worker: Any = Worker(engine, rank)
            came[rank] = program(worker, lambda: None)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return came


class TestEngineChannel(CollectiveContract):
    """The contract, but for what the engine keeps in its place."""

    @pytest.fixture
    def ranks(self) -> RanksOfAnEngine:
        return RanksOfAnEngine()


for _name in EXEMPT:
    setattr(TestEngineChannel, _name, None)


def header(number: int) -> Vector:
    """Return what a decider launches a round with."""
    lanes: Vector = np.zeros(LANES, dtype=np.int64)
    lanes[ROUND] = number
    return lanes


def ballot(rank: int, number: int) -> FoldedBallots:
    return FoldedBallots.of(rank, number, header(number))


def test_every_clause_that_is_not_kept_is_one_of_the_contract() -> None:
    assert all(hasattr(CollectiveContract, name) for name in EXEMPT)


def test_a_round_is_answered_once_every_rank_s_ballot_is_in_it() -> None:
    channel = EngineChannel(2)
    said = [channel.answered]
    channel.launch(header(1))
    said.append(channel.answered)
    channel.deliver(ballot(1, 1))
    said += [channel.answered, channel.asks_again]
    channel.deliver(ballot(0, 1).joined(ballot(1, 1)))
    said += [channel.answered, channel.asks_again]

    assert said == [True, False, False, True, True, False]
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
