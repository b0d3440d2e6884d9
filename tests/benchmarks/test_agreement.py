"""`lockstep bench agreement`: its report and its output, but not the measured numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.benchmarks.agreement import AgreementReport
from lockstep.coordinator.lanes import BallotShape
from tests.kit.launch.in_process import IN_A_PROCESS, Run

QUICK = ["--blocks", "1", "--work-us", "10"]
PATIENCE_S = 120.0
TIMES = (
    *("blocking_us", "idle_step_us", "pipelined_stall_us"),
    *("python_us", "exchange_us", "exchange_alone_us"),
)


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, because the command starts ranks as child processes."""
    command = [*IN_A_PROCESS, "bench", "agreement", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def report_of(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


@pytest.mark.distributed
@pytest.mark.parametrize("transport", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_report_has_every_figure_of_every_transport(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "agreement.json"

    ended = bench(
        *QUICK, "--ranks", "2", "--operations", "3", "--transport", transport, "--report", path
    )

    assert ended.returncode == 0, ended.stderr
    report = report_of(path)
    assert set(report) == set(AgreementReport.__annotations__)
    assert report["transport"].startswith("shm" if transport == "auto" else transport)
    assert report["collectives_per_step"] == 1
    assert (report["ranks"], report["operations"], report["work_us"]) == (2, 3, 10)
    assert report["lanes"] == BallotShape(world_size=2, prefetch_slots=3).length
    assert [each for each in TIMES if not 0 < report[each]["p50"] <= report[each]["p99"]] == []
    assert report["limit_us"]["gloo"] > 0
    assert report["limit_us"]["shm"] > 0
    assert report["per_request_us"] > 0
    assert "2 ranks on" in ended.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_a_pretended_host_is_another_host_to_the_transport(tmp_path: Path) -> None:
    path = tmp_path / "agreement.json"

    ended = bench(*QUICK, "--ranks", "4", "--hosts", "3", "--report", path)

    assert ended.returncode == 0, ended.stderr
    report = report_of(path)
    assert report["transport"] == "hierarchical: 4 ranks are on 3 hosts"
    assert (report["hosts"], report["blocks"]) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "0"], "--ranks. Must be >= 1"),
        (["--operations", "-1"], "--operations. Must be >= 0"),
        (["--work-us", "-5"], "--work-us. Must be >= 0"),
        (["--ranks", "2", "--hosts", "3"], "--hosts is 3, must be at most --ranks, 2"),
        (["--transport", "pigeon"], '--transport. Choose from: "auto", "torch", "shm"'),
    ],
)
def test_what_cannot_be_measured_is_refused(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    status, _, error = lockstep("bench", "agreement", *QUICK, *arguments)

    assert status == 2
    assert complaint in error


@pytest.mark.slow
@pytest.mark.distributed
def test_a_transport_that_the_hosts_do_not_allow_is_refused() -> None:
    ended = bench(*QUICK, "--ranks", "2", "--hosts", "2", "--transport", "shm")

    assert ended.returncode != 0
    assert "shm needs all ranks on one host" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.distributed
def test_ctrl_c_does_not_reach_the_process_that_ranks_are_forked_from(tmp_path: Path) -> None:
    """If Ctrl-C reached the fork server, the server would print a traceback among the output."""
    tmp_path.joinpath("asked.py").write_text(
        "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    program = (
        "import multiprocessing; from lockstep.benchmarks.rank_processes import _start_fork_server;"
        "multiprocessing.get_context('forkserver').set_forkserver_preload(['asked']);"
        "_start_fork_server()"
    )

    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert finished.stdout == "True\n"


def test_ranks_that_cannot_meet_are_not_started(
    lockstep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.bench.LOOPBACK", "192.0.2.1", raising=False)

    status, _, error = lockstep("bench", "agreement", *QUICK)

    assert status == 3
    assert error.startswith("lockstep: ranks cannot connect to each other at 192.0.2.1: ")
