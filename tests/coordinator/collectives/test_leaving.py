"""Leaving a group in odd moments: by a signal's handler, by Ctrl-C, and what is left of it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.ballot import Ballot
from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives.ending import Ending
from lockstep.coordinator.collectives.host_group import HostGroup, HostIdentity
from lockstep.coordinator.collectives.shared_memory import SharedMemoryCollective
from lockstep.coordinator.divergence import Recorder
from lockstep.coordinator.lanes import BallotShape, Voter
from lockstep.coordinator.round import Rounds
from lockstep.coordinator.seats import Seats
from lockstep.errors import PeerLost
from tests.kit.collectives.contract import PATIENCE_S, Hold, lanes_of
from tests.kit.ranks.as_processes import BUILDS, RanksAsProcesses
from tests.kit.ranks.as_threads import RanksAsThreads

pytestmark = pytest.mark.distributed

SHARING = pytest.mark.parametrize("name", ["shm", "hierarchical"])


@pytest.mark.parametrize("after", ["write", "wake"])
def test_an_interrupt_in_a_launch_ends_the_epoch(
    after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13: the others may have this rank's vote, which must not be given a second time."""
    outcomes = RanksAsThreads().run(partial(interrupt_a_launch, monkeypatch, after), 2)

    assert outcomes[0] == ("PeerLost", "this rank was interrupted in round 2: KeyboardInterrupt")
    assert outcomes[1][0] == "PeerLost"


@SHARING
def test_a_close_that_was_interrupted_can_be_called_again(name: str, tmp_path: Path) -> None:
    """Nothing stays open because of Ctrl-C."""
    ranks = RanksAsProcesses(tmp_path, BUILDS[name])

    assert ranks.run(interrupt_a_close, 2) == [True, True]


def test_an_error_that_is_raised_again_and_again_does_not_grow(tmp_path: Path) -> None:
    frames, _ = RanksAsProcesses(tmp_path, BUILDS["shm"]).run(raise_many_times, 2, late={1})

    assert frames < 10


def interrupt_a_launch(
    monkeypatch: pytest.MonkeyPatch, after: str, group: Collective, hold: Hold
) -> tuple[str, str]:
    identities = [HostIdentity.here()] * group.world_size
    shape = BallotShape(world_size=2, seats=1)
    collective = SharedMemoryCollective.create(
        group, identities, lanes=shape.length, timeout_s=PATIENCE_S
    )
    rounds = Rounds(collective, shape, timeout_s=PATIENCE_S, recorder=Recorder(), epoch=1)
    ballot, table = Ballot(shape, collective.rank), Seats(1).freeze()
    open_one = partial(rounds.open, table, 0, ballot, Voter(healthy=True, time_ms=1))
    open_one()
    rounds.close()
    if not collective.rank:
        host: Any = vars(collective)["_host"]
        target: Any = host if after == "write" else getattr(host.cells, "_futex")  # noqa: B009
        monkeypatch.setattr(target, after, interrupted(getattr(target, after)))
        with pytest.raises(KeyboardInterrupt):
            open_one()
        monkeypatch.undo()
    else:
        open_one()

    def go_on() -> None:
        if collective.rank:
            # The round that the other was interrupted in came back whole.
            rounds.close()
        open_one()
        rounds.close()

    with pytest.raises(PeerLost) as raised:
        go_on()
    return type(raised.value).__name__, str(raised.value)


def interrupted(call: Callable[..., Any]) -> Callable[..., None]:
    def call_and_be_interrupted(*arguments: Any) -> None:
        call(*arguments)
        raise KeyboardInterrupt

    return call_and_be_interrupted


def interrupt_a_close(collective: Collective, hold: Hold) -> bool:
    collective.launch(lanes_of(0)).wait(PATIENCE_S)
    end, closed = HostGroup.end, HostGroup.close
    interruptions = [KeyboardInterrupt]
    ended: list[bool] = []

    def end_or_be_interrupted(self: HostGroup, ending: Ending) -> Ending:
        if interruptions and collective.rank == 1:
            raise interruptions.pop()
        return end(self, ending)

    def close_and_tell(self: HostGroup) -> None:
        closed(self)
        ended.append(True)

    HostGroup.end = end_or_be_interrupted  # type: ignore[method-assign] # this process's own.
    HostGroup.close = close_and_tell  # type: ignore[method-assign] # as above.
    if collective.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            collective.close()
    collective.close()
    return ended == [True]


def raise_many_times(collective: Collective, hold: Hold) -> int:
    collective.launch(lanes_of(0)).wait(PATIENCE_S)
    if collective.rank:
        hold()
        return 0
    pending = collective.launch(lanes_of(0))
    error: BaseException | None = None
    for _ in range(50):
        try:
            pending.wait(0.0)
            collective.launch(lanes_of(0))
        except TimeoutError as raised:
            error = raised
    assert error is not None
    frames, trace = 0, error.__traceback__
    while trace is not None:
        frames, trace = frames + 1, trace.tb_next
    return frames
