"""Shared memory between ranks: setup, ranks that arrive during a check, and interrupted exits."""

import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lockstep.coordinator.ballot import Ballot
from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives import shared_memory
from lockstep.coordinator.collectives.ending import Ending, EndingCause
from lockstep.coordinator.collectives.shared_memory import Cells, HostGroup
from lockstep.coordinator.divergence import Recorder
from lockstep.coordinator.lanes import BallotShape, Voter
from lockstep.coordinator.prefetch_slots import PrefetchSlots
from lockstep.coordinator.round import Rounds
from lockstep.errors import ConfigError, GroupError, PeerLost
from tests.kit.collectives.contract import PATIENCE_S, Hold, lanes_of, outcome_of
from tests.kit.collectives.fault_points import Holdings, lanes_in
from tests.kit.ranks.as_processes import (
    BUILDS,
    Piped,
    RanksAsProcesses,
    over_pipes,
    over_shared_memory,
)
from tests.kit.ranks.as_threads import RanksAsThreads

pytestmark = pytest.mark.distributed

NOBODY = 65534
"""The user id of `nobody`, who has no rights here."""

BLOCKED_S = 0.3
"""Seconds within which a thread that is not blocked certainly finishes."""


@pytest.fixture
def ranks(tmp_path: Path) -> RanksAsProcesses:
    return RanksAsProcesses(tmp_path, join=over_pipes)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError("refused by the test")


TROUBLE: dict[str, tuple[int, Any, str]] = {
    "the first rank cannot make it": (0, os, "memfd_create"),
    "the first rank cannot size it": (0, os, "ftruncate"),
    "the first rank cannot seal it": (0, fcntl, "fcntl"),
    "the first rank cannot map it": (0, mmap, "mmap"),
    "the first rank cannot watch another": (0, os, "pidfd_open"),
    "the second rank cannot open it": (1, shared_memory, "_open_memory"),
    "the second rank cannot map it": (1, mmap, "mmap"),
    "the last rank cannot watch another": (2, os, "pidfd_open"),
    "the last rank has no futex": (2, shared_memory, "Futex"),
}
"""By case: the rank on which setup fails, and the module and name of the function that fails."""


@pytest.mark.parametrize("trouble", TROUBLE)
def test_if_one_rank_cannot_share_memory_every_rank_says_so_and_nothing_is_left(
    ranks: RanksAsProcesses, trouble: str
) -> None:
    """Rule R1: if one rank cannot share memory, no rank hangs and the bootstrap group stays usable."""
    results = ranks.run(partial(meet_in_trouble, trouble), 3)

    (error,) = {error for error, _, _ in results}
    assert "refused by the test" in error
    assert [gathered for _, gathered, _ in results] == [[b"0", b"1", b"2"]] * 3
    assert [left for _, _, left in results] == [[]] * 3


def meet_in_trouble(trouble: str, group: Piped, hold: Hold) -> tuple[str, list[bytes], list[str]]:
    rank, module, name = TROUBLE[trouble]
    before = Holdings()
    done = refuse if group.rank == rank else getattr(module, name)
    with patch.object(module, name, done), pytest.raises(ConfigError) as raised:
        over_shared_memory(group)
    gathered = group.gather(str(group.rank).encode(), PATIENCE_S)
    # Count open resources while the raised error still exists, because its traceback could keep them
    # open.
    return str(raised.value), gathered, before.left_over()


def test_if_a_rank_dies_while_they_meet_the_others_have_nothing_left(
    ranks: RanksAsProcesses,
) -> None:
    """Rule R10: if a rank dies during setup, a rank that has created the memory releases it."""
    with ranks.start(meet_nobody, 2) as group:
        assert group.result(0) == ("PeerLost", [])


def meet_nobody(group: Piped, hold: Hold) -> tuple[str, list[str]]:
    if group.rank:
        os._exit(0)
    before = Holdings()
    error, _ = outcome_of(lambda: over_shared_memory(group))
    return error, before.left_over()


def test_the_memory_has_no_name_and_is_for_one_user_alone(ranks: RanksAsProcesses) -> None:
    modes, links, opened_by_another = zip(*ranks.run(look_at_the_memory, 2), strict=True)

    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}
    assert set(links) == {0}
    assert set(opened_by_another) <= {"PermissionError", "only root can be another user"}


def look_at_the_memory(group: Piped, hold: Hold) -> tuple[int, int, str]:
    collective: Any = over_shared_memory(group)
    fd = collective._host._fd
    status = os.fstat(fd)
    opened = as_another_user(partial(os.open, f"/proc/{os.getpid()}/fd/{fd}", os.O_RDONLY))
    group.gather(b"", PATIENCE_S)
    collective.close()
    return status.st_mode, status.st_nlink, opened


def as_another_user(call: Callable[[], object]) -> str:
    """Run the call as a user without rights to the files; return the name of its error."""
    if os.geteuid():
        return "only root can be another user"
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        error_name = "nothing"
        try:
            call()
        except OSError as error:
            error_name = type(error).__name__
        os.write(writer, error_name.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


def test_a_process_may_have_thousands_of_open_files(ranks: RanksAsProcesses) -> None:
    """File descriptors above 1023 work, because `poll` can watch them and `select` cannot."""
    with ranks.start(open_many_and_die, 2) as group:
        assert group.result(0) == (True, "PeerLost")


def open_many_and_die(group: Piped, hold: Hold) -> tuple[bool, str]:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    collective: Any = over_shared_memory(group)
    beyond = min(collective._host._rank_by_process) > 1024
    collective.launch(lanes_of(0)).wait(PATIENCE_S)
    if group.rank:
        os._exit(0)
    then, _ = outcome_of(lambda: collective.launch(lanes_of(0)).wait(PATIENCE_S))
    collective.close()
    for each in files:
        os.close(each)
    return beyond, then


def test_a_deadline_of_zero_finds_what_has_come(ranks: RanksAsProcesses) -> None:
    """Rule R10: a wait with timeout 0 still checks once for a complete round."""
    assert ranks.run(wait_for_no_time, 3) == [[0] * 50] * 3


def wait_for_no_time(group: Piped, hold: Hold) -> list[int]:
    collective: Any = over_shared_memory(group)
    minima: list[int] = []
    for _ in range(50):
        pending = collective.launch(lanes_of(group.rank))
        group.gather(b"", PATIENCE_S)
        minima.append(int(pending.wait(0.0)[0]))
    collective.close()
    return minima


def test_a_rank_that_dies_as_soon_as_it_has_come_is_not_missed_in_that_round(
    ranks: RanksAsProcesses,
) -> None:
    """A round is complete once all lanes are written, even if their last writer has died since.

    If this rank reported the death instead, it would end the epoch one round before the ranks that
    found all lanes.
    """
    with ranks.start(partial(miss_the_moment, "dies", PATIENCE_S), 2) as group:
        assert group.result(1) == "a vector"


def test_a_rank_that_comes_at_the_deadline_is_late_and_not_the_other_hosts(
    ranks: RanksAsProcesses,
) -> None:
    """The error names the late rank and blames no other host, because the group has one host."""
    errors = ranks.run(partial(miss_the_moment, "stays", 0.0), 2, late={0})

    assert errors[1] == "rank 0 did not join round 1 before the deadline"


def miss_the_moment(then: str, timeout_s: float, group: Piped, hold: Hold) -> str:
    """Let rank 1 look for rank 0's lanes; right after that, rank 0 writes them.

    Then rank 0 ends at once if `then` is "dies".
    """
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
    setattr(shared_memory, "_LOOKS", 0)  # noqa: B010 - it is the module's own.
    read = host.cells.read
    seen: list[Any] = []

    def read_too_soon(*where: Any) -> Any:
        if seen:
            return read(*where)
        seen.append(read(*where))
        group.gather(b"looked", PATIENCE_S)
        if then == "dies":
            assert host._ended_processes.poll(PATIENCE_S * 1000)
        else:
            group.gather(b"come", PATIENCE_S)
        return seen[0]

    host.cells.read = read_too_soon
    try:
        collective.launch(lanes_in(1, 1)).wait(timeout_s)
    except GroupError as error:
        return str(error)
    return "a vector"


def test_two_threads_of_a_rank_tell_of_one_ending(ranks: RanksAsProcesses) -> None:
    """Two threads of one rank may end the epoch at once: the waiting one and the host-leader thread."""
    assert ranks.run(end_twice, 1) == [["LATE", "LATE", "LATE"]]


def end_twice(group: Piped, hold: Hold) -> list[str]:
    """Return the cause that each of two threads reports, and the cause recorded for other ranks."""
    collective: Any = over_shared_memory(group)
    host = collective._host
    causes: list[str] = []
    ending: Any = Cells.ending
    other = threading.Thread(
        target=lambda: causes.append(host.end(EndingCause.LATE_ELSEWHERE, 0, 0).cause.name)
    )

    def look(cells: Cells) -> int:
        word = int(ending.fget(cells))
        if threading.current_thread() is not other and other.ident is None:
            other.start()
            other.join(BLOCKED_S)
        return word

    Cells.ending = property(look, ending.fset)  # type: ignore[method-assign,assignment]
    causes.append(host.end(EndingCause.LATE, 0, 0).cause.name)
    other.join(PATIENCE_S)
    causes.append(Ending.of(host.cells.ending).cause.name)
    collective.close()
    return causes


def test_an_interrupt_in_a_launch_ends_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: the epoch ends, because the interrupted rank must not vote again in the same round.

    Other ranks may have read the vote that it cast before the interrupt.
    """
    outcomes = RanksAsThreads().run(partial(interrupt_a_launch, monkeypatch), 2)

    assert outcomes[0] == ("PeerLost", "this rank was interrupted in round 2: KeyboardInterrupt")
    assert outcomes[1][0] == "PeerLost"


def interrupt_a_launch(
    monkeypatch: pytest.MonkeyPatch, group: Collective, hold: Hold
) -> tuple[str, str]:
    shape = BallotShape(world_size=2, prefetch_slots=1)
    collective: Any = over_shared_memory(group, shape.length)
    rounds = Rounds(collective, shape, timeout_s=PATIENCE_S, recorder=Recorder(), epoch=1)
    ballot, table = Ballot(shape, collective.rank), PrefetchSlots(1).freeze()
    open_one = partial(rounds.open, table, 0, ballot, Voter(healthy=True, time_ms=1))
    open_one()
    rounds.close()
    if not collective.rank:
        cells = collective._host.cells
        write = cells.write

        def write_and_be_interrupted(*arguments: Any) -> None:
            write(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(cells, "write", write_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_one()
        monkeypatch.undo()
    else:
        open_one()

    def go_on() -> None:
        if collective.rank:
            # The round that was in flight when the other rank was interrupted completes normally.
            rounds.close()
        open_one()
        rounds.close()

    with pytest.raises(PeerLost) as raised:
        go_on()
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize("name", ["shm", "hierarchical"])
def test_a_close_that_was_interrupted_can_be_called_again(name: str, tmp_path: Path) -> None:
    ranks = RanksAsProcesses(tmp_path, BUILDS[name])

    assert ranks.run(interrupt_a_close, 2) == [True, True]


def interrupt_a_close(collective: Collective, hold: Hold) -> bool:
    collective.launch(lanes_of(0)).wait(PATIENCE_S)
    interruptions = [KeyboardInterrupt] * collective.rank
    ended: list[bool] = []

    class Interrupted(HostGroup):
        def end(self, cause: EndingCause, rank: int, last_round: int) -> Ending:
            if interruptions:
                raise interruptions.pop()
            return super().end(cause, rank, last_round)

        def close(self) -> None:
            super().close()
            ended.append(True)

    host: Any = vars(collective)["_host"]
    host.__class__ = Interrupted
    if collective.rank:
        with pytest.raises(KeyboardInterrupt):
            collective.close()
    collective.close()
    return ended == [True]


def test_an_error_that_is_raised_again_and_again_does_not_grow(tmp_path: Path) -> None:
    frames, _ = RanksAsProcesses(tmp_path, BUILDS["shm"]).run(raise_many_times, 2, late={1})

    assert frames < 10


def raise_many_times(collective: Collective, hold: Hold) -> int:
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
