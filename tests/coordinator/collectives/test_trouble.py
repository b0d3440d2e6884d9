"""Ranks with forked children, damaged memory, Ctrl-C, and processes that exit without a close."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives import shared_memory
from lockstep.coordinator.collectives.shared_memory import Cells
from lockstep.errors import GroupError, InternalError
from tests.kit.collectives.contract import LANES, PATIENCE_S, PROMPT_S, Hold
from tests.kit.collectives.fault_points import Holdings, Opening, lanes_in
from tests.kit.programs import program
from tests.kit.ranks.as_processes import BUILDS, RanksAsProcesses

pytestmark = pytest.mark.distributed

RANK = "tests.kit.collectives.ending_rank"

JOINS = {"shm": Opening.over_pipes, "hierarchical": Opening.over_gloo}


def ranks_over(transport: str, folder: Path) -> RanksAsProcesses:
    return RanksAsProcesses(folder, join=JOINS[transport])


def outcome_of_a_round(collective: Collective) -> tuple[str, str, bool]:
    """Run a round; return the error's name and text (or "vector"), and whether it ended quickly."""
    started = time.monotonic()
    try:
        collective.launch(lanes_in(1, collective.rank)).wait(PATIENCE_S)
    except GroupError as error:
        return type(error).__name__, str(error), time.monotonic() - started < PROMPT_S
    return "vector", "", True


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("killed", "rank 2 was lost in round 2: its process is gone"),
        ("closed", "rank 2 has left the group"),
    ],
)
def test_a_child_that_has_all_files_of_a_rank_does_not_keep_it_alive(
    ending: str, text: str, tmp_path: Path
) -> None:
    """Rule R10: a dead rank is noticed even if a forked child still has its file descriptors open."""
    with ranks_over("shm", tmp_path).start(partial(fork_and_end, ending), 3) as group:
        results = [group.result(rank) for rank in range(2)]

    assert results == [(("PeerLost", text, True), [])] * 2


def fork_and_end(
    ending: str, opening: Opening, hold: Hold
) -> tuple[tuple[str, str, bool], list[str]] | None:
    before = Holdings()
    collective = opening.make()
    assert outcome_of_a_round(collective)[0] == "vector"
    if collective.rank < 2:
        outcome = outcome_of_a_round(collective)
        collective.close()
        return outcome, before.left_over()
    parent = os.getpid()
    if not os.fork():
        # The child lives until the test closes its pipe to this rank.
        try:
            hold()
        finally:
            os._exit(0)
    if ending == "killed":
        os.kill(parent, signal.SIGKILL)
    collective.close()
    hold()
    return None


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_damaged_cell_ends_the_group_by_name_and_never_in_a_vector(
    world_size: int, tmp_path: Path
) -> None:
    """Rule R9, applied to lanes: ranks detect a damaged cell of shared memory by its checksum."""
    outcomes = ranks_over("shm", tmp_path).run(partial(damage, 1, 1), world_size)

    text = "the lanes that rank 1 wrote in round 2 have a wrong checksum"
    assert outcomes == [("PeerLost", text, True)] * world_size


@pytest.mark.parametrize(("rank", "writer", "named"), [(3, 1, 3), (2, 2, 2), (2, 0, 2)])
def test_a_damaged_cell_of_any_host_ends_the_group_by_name(
    rank: int, writer: int, named: int, tmp_path: Path
) -> None:
    """If a host leader's cell is damaged, all hosts raise the same error.

    The leader's own host raises the error one round before the other hosts.
    """
    outcomes = ranks_over("hierarchical", tmp_path).run(partial(damage, rank, writer), 4)

    text = f"the lanes that rank {named} wrote in round 2 have a wrong checksum"
    assert outcomes == [("PeerLost", text, True)] * 4


def damage(rank: int, writer: int, opening: Opening, hold: Hold) -> tuple[str, str, bool]:
    """Let `rank`'s process corrupt each write of cell number `writer`, from round 2 on."""
    collective: Any = opening.make()
    assert outcome_of_a_round(collective)[0] == "vector"
    if collective.rank == rank:
        cells = collective._host.cells
        cells.write = partial(write_wrongly, cells, writer)
    outcome = outcome_of_a_round(collective)
    if outcome[0] == "vector":
        outcome = outcome_of_a_round(collective)
    collective.close()
    return outcome


def write_wrongly(cells: Any, spoilt: int, writer: int, number: int, lanes: Any) -> None:
    if writer != spoilt:
        Cells.write(cells, writer, number, lanes)
        return
    with patch.object(shared_memory, "xxh3_64_intdigest", return_value=12345):
        Cells.write(cells, writer, number, lanes)


def test_a_damaged_ending_is_told_by_name(tmp_path: Path) -> None:
    assert ranks_over("shm", tmp_path).run(damage_the_ending, 1) == [
        f"the word {1 << 40} encodes no ending of a group"
    ]


def damage_the_ending(opening: Opening, hold: Hold) -> str:
    collective: Any = opening.make()
    collective._host.cells.ending = 1 << 40
    try:
        collective.launch(np.zeros(LANES, dtype=np.int64)).wait(PATIENCE_S)
    except InternalError as error:
        return str(error)
    return "a vector"


@pytest.mark.parametrize("transport", BUILDS)
def test_a_rank_that_waits_for_another_can_be_interrupted(transport: str, tmp_path: Path) -> None:
    ranks = RanksAsProcesses(tmp_path, BUILDS[transport])
    with ranks.start(wait_and_be_interrupted, 2) as group:
        assert group.result(0) == ("interrupted", True)


def wait_and_be_interrupted(collective: Collective, hold: Hold) -> tuple[str, bool]:
    assert outcome_of_a_round(collective)[0] == "vector"
    if collective.rank:
        hold()
        return "", True
    started = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        result, _, _ = outcome_of_a_round(collective)
    except KeyboardInterrupt:
        result = "interrupted"
    took_s = time.monotonic() - started
    collective.close()
    return result, took_s < PROMPT_S


ENDINGS = {
    "return": (0, "", "PeerLost"),
    "exit": (7, "", "PeerLost"),
    "raise": (1, "[rank0]: RuntimeError: raised by the test", "PeerLost"),
    "pending": (0, "", ""),
}
"""For each way in which rank 0 ends: its exit code, its last line on stderr, and rank 1's error."""


@contextmanager
def two_programs(
    *arguments: object,
) -> Generator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Run the program as rank 0 and as rank 1, each with pipes to the test.

    At the end of the `with` block, processes that still run are killed.
    """
    processes = [
        subprocess.Popen(
            program(RANK, rank, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints; the process's own deadline bounds the wait."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def marked(transport: str, ending: str) -> Any:
    fast = (("hierarchical", "raise"), ("torch", "close"), ("torch", "collect"))
    marks = () if (transport, ending) in fast else pytest.mark.slow
    return pytest.param(transport, ending, marks=marks)


@contextmanager
def first_has_ended(
    folder: Path, transport: str, ending: str
) -> Generator[tuple[subprocess.Popen[str], float]]:
    """Require that rank 0 exits promptly with the expected code; yield (rank 1, start of the wait)."""
    code, complaint, _ = ENDINGS.get(ending, (0, "", ""))
    with two_programs(folder / "store", transport, ending, PATIENCE_S) as (first, second):
        assert line_of(first) == line_of(second) == "met"
        started = time.monotonic()
        _, complaints = first.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - started < PROMPT_S
        assert first.returncode == code, complaints
        assert complaints.splitlines()[-1:] == [complaint] * bool(complaint), complaints
        yield second, started


@pytest.mark.parametrize(
    ("transport", "ending"),
    [marked("torch", each) for each in ("close", "collect", "pending", "destroy_default")],
)
def test_a_process_ends_at_once_and_as_it_would_whatever_is_pending(
    transport: str, ending: str, tmp_path: Path
) -> None:
    with first_has_ended(tmp_path, transport, ending):
        pass


@pytest.mark.parametrize(
    ("transport", "ending"), [marked(*each) for each in product(JOINS, ENDINGS)]
)
def test_a_process_that_ends_is_held_by_no_host_leader_and_the_others_learn(
    transport: str, ending: str, tmp_path: Path
) -> None:
    """Rule R10: a host-leader thread does not delay the exit of its process."""
    _, _, news = ENDINGS[ending]
    with first_has_ended(tmp_path, transport, ending) as (second, started):
        assert line_of(second) == news
        assert second.wait(PATIENCE_S) == 0
        assert time.monotonic() - started < PROMPT_S


@pytest.mark.slow
def test_the_host_leader_of_a_main_thread_that_has_ended_says_so_while_the_process_goes_on(
    tmp_path: Path,
) -> None:
    """Rule R10: if a rank's main thread ends, the other rank gets an error at once.

    Other threads may keep the process alive.
    """
    with two_programs(tmp_path / "store", "hierarchical", "linger", PATIENCE_S) as (
        first,
        second,
    ):
        assert line_of(first) == line_of(second) == "met"
        started = time.monotonic()
        assert line_of(second) == "PeerLost"
        assert time.monotonic() - started < PROMPT_S
        assert first.poll() is None
