"""How ranks come to share memory: for themselves alone, and all of them or none."""

import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lockstep.coordinator.collectives import host_group
from lockstep.errors import ConfigError, GroupError
from tests.kit.collectives.contract import PATIENCE_S, Hold, outcome_of
from tests.kit.collectives.fault_points import Holdings
from tests.kit.ranks.as_processes import Piped, RanksAsProcesses, over_pipes, over_shared_memory

pytestmark = pytest.mark.distributed

NOBODY = 65534
"""The id of a user who has nothing to do with these tests."""


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
    "the second rank cannot open it": (1, host_group, "_open_memory"),
    "the second rank cannot map it": (1, mmap, "mmap"),
    "the last rank cannot watch another": (2, os, "pidfd_open"),
    "the last rank has no futex": (2, host_group, "Futex"),
}
"""Which rank fails in what."""


@pytest.mark.parametrize("trouble", TROUBLE)
def test_if_one_rank_cannot_share_memory_every_rank_says_so_and_nothing_is_left(
    ranks: RanksAsProcesses, trouble: str
) -> None:
    """Rule R1: no rank is left waiting for one that cannot, and the group is as it was."""
    told = ranks.run(partial(meet_in_trouble, trouble), 3)

    (error,) = {error for error, _, _ in told}
    assert "refused by the test" in error
    assert [gathered for _, gathered, _ in told] == [[b"0", b"1", b"2"]] * 3
    assert [left for _, _, left in told] == [[]] * 3


def meet_in_trouble(trouble: str, group: Piped, hold: Hold) -> tuple[str, list[bytes], list[str]]:
    rank, module, name = TROUBLE[trouble]
    before = Holdings()
    done = refuse if group.rank == rank else getattr(module, name)
    with patch.object(module, name, done), pytest.raises(ConfigError) as raised:
        over_shared_memory(group)
    gathered = group.gather(str(group.rank).encode(), PATIENCE_S)
    # Nothing is left although the error is kept.
    return str(raised.value), gathered, before.left_over()


def test_if_a_rank_dies_while_they_meet_the_others_have_nothing_left(
    ranks: RanksAsProcesses,
) -> None:
    """Rule R10: also the rank that has made the memory by then."""
    with ranks.start(meet_nobody, 2) as group:
        assert group.result(0) == ("PeerLost", [])


def meet_nobody(group: Piped, hold: Hold) -> tuple[str, list[str]]:
    if group.rank:
        os._exit(0)
    before = Holdings()
    error, _ = outcome_of(lambda: over_shared_memory(group))
    return error, before.left_over()


def test_the_memory_has_no_name_and_is_for_one_user_alone(ranks: RanksAsProcesses) -> None:
    """What ranks tell each other is nobody else's business."""
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
    """Return the name of the error that the call raises for a user without rights here."""
    if os.geteuid():
        return "only root can be another user"
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        said = "nothing"
        try:
            call()
        except OSError as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


def test_two_groups_of_one_process_do_not_meet(ranks: RanksAsProcesses) -> None:
    """Each has memory of its own, and one that ends leaves the other as it is."""
    expected = [list(range(0, 200, 2)), list(range(1000, 1200, 2))]

    assert ranks.run(run_two_groups, 2) == [(expected, ("PeerLost", "vector"), [])] * 2


def run_two_groups(group: Piped, hold: Hold) -> tuple[list[list[int]], tuple[str, str], list[str]]:
    import numpy as np

    before = Holdings()
    first: Any = over_shared_memory(group, 1)
    second: Any = over_shared_memory(group, 1)
    came: list[list[int]] = [[], []]
    for number in range(100):
        lanes = np.array([number * 2 + group.rank])
        one = first.launch(lanes)
        # The same round of the other has begun on no rank, or on all, when this one is read.
        other = second.launch(lanes + 1000)
        for at, pending in ((1, other), (0, one)):
            came[at] += pending.wait(PATIENCE_S).tolist()
    if group.rank:
        first.close()
    after = (said_by(first), said_by(second))
    group.gather(b"", PATIENCE_S)
    for each in (first, second):
        each.close()
    return came, after, before.left_over()


def said_by(collective: Any) -> str:
    import numpy as np

    try:
        collective.launch(np.array([0])).wait(PATIENCE_S)
    except GroupError as error:
        return type(error).__name__
    return "vector"


def test_a_process_may_have_thousands_of_open_files(ranks: RanksAsProcesses) -> None:
    """What `select` cannot watch, `poll` can."""
    with ranks.start(open_many_and_die, 2) as group:
        assert group.result(0) == (True, "PeerLost")


def open_many_and_die(group: Piped, hold: Hold) -> tuple[bool, str]:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    collective: Any = over_shared_memory(group, 1)
    beyond = min(collective._host._rank_by_process) > 1024
    first = said_by(collective)
    if group.rank:
        os._exit(0)
    then = said_by(collective)
    collective.close()
    for each in files:
        os.close(each)
    return beyond and first == "vector", then


def test_a_deadline_of_zero_finds_what_has_come(ranks: RanksAsProcesses) -> None:
    """Rule R10: no time to wait is time to look."""
    assert ranks.run(wait_for_no_time, 3) == [["vector"] * 50] * 3


def wait_for_no_time(group: Piped, hold: Hold) -> list[str]:
    import numpy as np

    collective: Any = over_shared_memory(group, 1)
    said: list[str] = []
    for _ in range(50):
        pending = collective.launch(np.array([1]))
        group.gather(b"", PATIENCE_S)
        pending.wait(0.0)
        said.append("vector")
    collective.close()
    return said
