"""Moments between two looks of a rank at the memory, made to happen."""

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.collectives import host_group
from lockstep.coordinator.collectives.cells import Cells
from lockstep.coordinator.collectives.ending import Ending, EndingCause
from lockstep.errors import GroupError
from tests.kit.collectives.contract import PATIENCE_S, Hold
from tests.kit.collectives.fault_points import lanes_in
from tests.kit.ranks.as_processes import Piped, RanksAsProcesses, over_pipes, over_shared_memory

pytestmark = pytest.mark.distributed

BLOCKED_S = 0.3
"""Long enough for a thread that is not held back."""


@pytest.fixture
def ranks(tmp_path: Path) -> RanksAsProcesses:
    return RanksAsProcesses(tmp_path, join=over_pipes)


def test_a_rank_that_dies_as_soon_as_it_has_come_is_not_missed_in_that_round(
    ranks: RanksAsProcesses,
) -> None:
    """Or one rank would end the epoch a round before the others, which find all lanes there."""
    with ranks.start(partial(miss_the_moment, "dies", PATIENCE_S), 2) as group:
        assert group.result(1) == "a vector"


def test_a_rank_that_comes_at_the_deadline_is_late_and_not_the_other_hosts(
    ranks: RanksAsProcesses,
) -> None:
    """There are no other hosts."""
    told = ranks.run(partial(miss_the_moment, "stays", 0.0), 2, late={0})

    assert told[1] == "rank 0 did not come to round 1 within the deadline"


def miss_the_moment(then: str, timeout_s: float, group: Piped, hold: Hold) -> str:
    """Let rank 0 come, and perhaps die, when rank 1 has just seen that it has not."""
    collective: Any = over_shared_memory(group)
    if not group.rank:
        group.gather(b"looked", PATIENCE_S)
        collective.launch(lanes_in(1, 0))
        if then == "dies":
            os._exit(0)
        group.gather(b"come", PATIENCE_S)
        hold()
        return ""
    host = collective._host
    setattr(host_group, "_LOOKS", 0)  # noqa: B010 - it is the module's own.
    read = host.here.read
    seen: list[Any] = []

    def read_too_soon(*where: int) -> Any:
        if seen:
            return read(*where)
        seen.append(read(*where))
        group.gather(b"looked", PATIENCE_S)
        if then == "dies":
            assert host._ended_processes.poll(PATIENCE_S * 1000)
        else:
            group.gather(b"come", PATIENCE_S)
        return seen[0]

    host.here.read = read_too_soon
    try:
        collective.launch(lanes_in(1, 1)).wait(timeout_s)
    except GroupError as error:
        return str(error)
    return "a vector"


def test_two_threads_of_a_rank_tell_of_one_ending(ranks: RanksAsProcesses) -> None:
    """A rank's own wait and its courier may give up in the same moment."""
    assert ranks.run(end_twice, 1) == [["LATE", "LATE", "LATE"]]


def end_twice(group: Piped, hold: Hold) -> list[str]:
    """Return what each of two threads takes for the cause, and what all others will."""
    collective: Any = over_shared_memory(group)
    host = collective._host
    told: list[str] = []
    ending: Any = Cells.ending
    other = threading.Thread(
        target=lambda: told.append(host.end(Ending(EndingCause.LATE_ELSEWHERE, 0, 0)).cause.name)
    )

    def look(cells: Cells) -> int:
        word = int(ending.fget(cells))
        if threading.current_thread() is not other and other.ident is None:
            other.start()
            other.join(BLOCKED_S)
        return word

    Cells.ending = property(look, ending.fset)  # type: ignore[method-assign,assignment] # ours alone.
    told.append(host.end(Ending(EndingCause.LATE, 0, 0)).cause.name)
    other.join(PATIENCE_S)
    told.append(Ending.of(host.cells.ending).cause.name)
    collective.close()
    return told
