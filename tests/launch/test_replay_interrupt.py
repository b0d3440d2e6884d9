"""Ctrl-C and SIGTERM: every rank exits at once with one line, and no files or processes remain."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.launch.cli.exits import EXIT_GROUP
from lockstep.launch.replay.report import read_report
from lockstep.small_engine.workload import synthetic_requests
from tests.kit.launch.replays import COMMAND, RANK, Running, needs_ray, start, torchrun, write_trace
from tests.kit.telemetry.trace_file import TraceFile

pytestmark = pytest.mark.distributed

MODULE = RANK[-1]

AT_ONCE_S = 15.0
"""Maximum time in seconds until all processes of an interrupted replay have exited.

Ray needs seconds, and the machine may be busy.
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Running]]:
    """Commands that a test has started; those still running are killed after the test."""
    commands: list[Running] = []
    yield commands
    for command in commands:
        command.kill()


def begin(
    running: list[Running],
    tmp_path: Path,
    launcher: str,
    *options: object,
    ranks_only: bool = False,
) -> Running:
    """Start a replay that would run for minutes, and return once the replay writes to its store.

    With `ranks_only`, return earlier: once the rank processes exist, while they still import modules.
    """
    trace = write_trace(tmp_path / "trace.jsonl", synthetic_requests(3, 20_000))
    start_command = torchrun(2) if launcher == "torchrun" else (*COMMAND, "--launcher", launcher)
    arguments = (trace, "--ranks", 2, "--store", (tmp_path / "store").as_uri(), *options)
    command = start(
        (tmp_path / "errors").open("w+", encoding="utf-8"),
        *(*start_command, *arguments, "--report", tmp_path / "report.json"),
        TMPDIR=str(tmp_path),
    )
    running.append(command)
    if ranks_only:
        command.wait_until(lambda: len(ranks_of(command, "torch")) == 2)
    else:
        command.wait_until(lambda: pages(tmp_path) > 50)
    command.look()
    return command


def ranks_of(command: Running, launcher: str) -> list[psutil.Process]:
    """Return the rank processes, ordered by rank except under Ray."""
    if launcher == "ray":
        return [each for each in command.seen.values() if "RankActor" in " ".join(each.cmdline())]
    ranks = [each for each in command.seen.values() if MODULE in each.cmdline()]
    return sorted(ranks, key=lambda each: each.environ()["RANK"])


def pages(tmp_path: Path) -> int:
    return sum(1 for each in (tmp_path / "store").rglob("*") if each.is_file())


def output_lines(command: Running) -> list[str]:
    """Return the output lines, except warnings that another rank's store lacks a page."""
    return [line for line in command.output_so_far().splitlines() if " lacks page " not in line]


def interrupt(command: Running, how: str) -> None:
    if how == "ctrl-c":
        os.killpg(command.process.pid, signal.SIGINT)
    else:
        command.process.send_signal(signal.SIGINT if how == "sigint" else signal.SIGTERM)


def assert_nothing_is_left(command: Running, tmp_path: Path, shared: set[str]) -> None:
    assert command.survivors() == []
    assert {each.name for each in Path("/dev/shm").iterdir()} <= shared  # noqa: S108
    left = {each.name for each in tmp_path.iterdir()} - {
        "store",
        "trace.jsonl",
        "errors",
        "report.json",
        "timeline.json",
    }
    # torchrun leaves a directory behind for the logs of its own runs.
    assert {name for name in left if not name.startswith("torchelastic_")} == set()
    half_written = [each for each in (tmp_path / "store").rglob("*") if ".tmp" in each.name]
    assert half_written == []


def assert_counts_so_far_are_kept(tmp_path: Path) -> None:
    report = read_report(tmp_path / "report.json")
    assert report["interrupted"]
    assert report["ranks"] == 2
    assert report["steps"] > 0
    assert report["bytes"]["l1_to_l2"] > 0
    assert report["samples"] is not None
    assert report["samples"]["rounds"][-1] == report["rounds"]
    assert report["pages_corrupt"] == 0
    served = report["computed_tokens"] + sum(
        report["hit_tokens"][tier] for tier in ("device", "host", "storage")
    )
    assert served == report["prompt_tokens"]


@pytest.mark.parametrize(
    ("how", "launcher"),
    [
        ("ctrl-c", "torch"),
        pytest.param("ctrl-c", "ray", marks=[pytest.mark.slow, needs_ray]),
        pytest.param("sigint", "torch", marks=pytest.mark.slow),
        pytest.param("sigint", "ray", marks=[pytest.mark.slow, needs_ray]),
        pytest.param("sigterm", "torch", marks=pytest.mark.slow),
        pytest.param("sigterm", "ray", marks=[pytest.mark.slow, needs_ray]),
    ],
)
def test_an_interrupted_replay_ends_at_once_and_leaves_nothing_but_what_it_has_counted(
    running: list[Running], tmp_path: Path, launcher: str, how: str
) -> None:
    shared = {each.name for each in Path("/dev/shm").iterdir()}  # noqa: S108
    command = begin(running, tmp_path, launcher, "--timeline", tmp_path / "timeline.json")

    began = time.monotonic()
    interrupt(command, how)
    status = command.process.wait(30)
    took_s = time.monotonic() - began

    assert status == 130
    assert output_lines(command) == ["lockstep: interrupted"]
    assert_nothing_is_left(command, tmp_path, shared)
    assert_counts_so_far_are_kept(tmp_path)
    assert TraceFile.read(tmp_path / "timeline.json").rounds()
    assert took_s < AT_ONCE_S


@pytest.mark.slow
def test_a_rank_that_is_interrupted_alone_ends_the_replay_with_what_all_have_counted(
    running: list[Running], tmp_path: Path
) -> None:
    command = begin(running, tmp_path, "torch")

    ranks_of(command, "torch")[1].send_signal(signal.SIGTERM)
    status = command.process.wait(30)

    assert status == 130
    assert output_lines(command) == []
    assert_counts_so_far_are_kept(tmp_path)


@pytest.mark.slow
def test_an_interrupted_torchrun_leaves_no_rank_and_nothing_half_written(
    running: list[Running], tmp_path: Path
) -> None:
    shared = {each.name for each in Path("/dev/shm").iterdir()}  # noqa: S108
    command = begin(running, tmp_path, "torchrun")

    interrupt(command, "ctrl-c")
    command.process.wait(30)

    assert_nothing_is_left(command, tmp_path, shared)
    assert_counts_so_far_are_kept(tmp_path)
    assert [
        line for line in command.output_so_far().splitlines() if line.startswith("lockstep: ")
    ] == []


@pytest.mark.parametrize("ranks_only", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_whose_launcher_was_killed_end_by_themselves(
    running: list[Running], tmp_path: Path, ranks_only: bool
) -> None:
    command = begin(running, tmp_path, "torch", ranks_only=ranks_only)

    command.process.kill()
    command.process.wait(10)

    assert command.survivors_after(20) == []


def test_no_command_line_of_a_rank_says_what_its_store_is(
    running: list[Running], tmp_path: Path
) -> None:
    command = begin(running, tmp_path, "torch", ranks_only=True)

    # A URI may contain a password, so rank processes must not have it in their command lines.
    lines = [each.cmdline() for each in ranks_of(command, "torch")]
    assert [line for line in lines if "file://" in " ".join(line)] == []


def test_a_rank_that_is_killed_ends_the_others_and_is_named(
    running: list[Running], tmp_path: Path
) -> None:
    command = begin(running, tmp_path, "torch")

    ranks_of(command, "torch")[1].kill()
    status = command.process.wait(30)

    assert status == 128 + signal.SIGKILL
    assert command.survivors() == []
    assert command.output_so_far().splitlines()[-1:] == [
        "lockstep: rank 1 was killed by SIGKILL; the others were ended"
    ]


@pytest.mark.parametrize(
    ("launcher", "stopped", "named"),
    [
        ("torch", 0, "0"),
        pytest.param("torch", 1, "1", marks=pytest.mark.slow),
        # Ray starts processes before it assigns ranks, so either rank can be the stopped one.
        pytest.param("ray", 0, "[01]", marks=[pytest.mark.slow, needs_ray]),
    ],
)
def test_a_rank_that_is_stopped_ends_the_replay_soon_after_the_deadline_of_its_round(
    running: list[Running], tmp_path: Path, launcher: str, stopped: int, named: str
) -> None:
    """A process stopped by SIGSTOP does not react to SIGTERM; the launcher must not wait for it."""
    command = begin(running, tmp_path, launcher, "--round-timeout-s", 2)

    ranks_of(command, launcher)[stopped].send_signal(signal.SIGSTOP)
    status = command.process.wait(15)

    assert status == EXIT_GROUP
    assert command.survivors() == []
    assert re.fullmatch(
        rf"lockstep: rank {named} did not join round \d+ before the deadline;"
        r" a round may take 2 s \(--round-timeout-s\)",
        "\n".join(output_lines(command)),
    )
