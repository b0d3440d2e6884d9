"""Replays with real ranks, started in every way that a user has."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.cli.exits import EXIT_GROUP
from lockstep.launch.cli.rank_processes import run_ranks
from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.launch.replay.report import Report
from lockstep.small_engine.profiles import PROFILES
from lockstep.small_engine.workload import synthetic_requests
from tests.kit.launch.replays import COMMAND, RANK, needs_ray, replay, run, torchrun, write_trace
from tests.kit.launch.replays_in_process import replayed
from tests.kit.storage.files import limited

pytestmark = pytest.mark.distributed

ROOM = ("--device-pages", 4000, "--host-pages", 4000, "--output-tokens-max", 4)
ONE_AT_A_TIME = ("--concurrency", 1, *ROOM)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    return write_trace(folder / "trace.jsonl", synthetic_requests(7, 40))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, trace: Path) -> Report:
    report = tmp_path_factory.mktemp("ours") / "report.json"
    return replay(report, trace, "--requests", 20, *ONE_AT_A_TIME, "--ranks", 2)


@pytest.fixture(scope="module")
def store_of_64(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = (tmp_path_factory.mktemp("store-of-64") / "store").as_uri()
    replayed(ReplaySettings(ranks=1, requests=4, page_tokens=64, store=uri))
    return uri


def hit_tokens(report: Report) -> int:
    return sum(report["hit_tokens"][tier] for tier in ("device", "host", "storage"))


def assert_sound(report: Report, ranks: int, requests: int) -> None:
    assert (report["ranks"], report["requests"]) == (ranks, requests)
    assert report["computed_tokens"] + hit_tokens(report) == report["prompt_tokens"]
    assert report["steps"] == report["rounds"] == report["collectives"] > 0
    assert report["pages_corrupt"] == report["storage_corrupt"] == 0
    assert len(report["digests"]) == ranks
    assert len(set(report["digests"])) == 1
    assert report["round_us"]["p99"] >= report["round_us"]["p50"] > 0
    assert report["pages_rechecked"] > 0
    assert report["operations_left"] == 0
    assert report["violations"] == []


@pytest.mark.parametrize(
    "profile",
    [
        # This profile has every kind of state. The other profiles are marked as slow tests.
        "hybrid-all",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PROFILES if name != "hybrid-all"),
    ],
)
def test_ranks_of_every_model_stay_equal_under_pressure_and_restore_every_pool_exactly(
    tmp_path: Path, profile: str
) -> None:
    pressure = ("--device-pages", 120, "--host-pages", 110, "--concurrency", 4)
    store = ("--store", (tmp_path / "store").as_uri())

    # Start the replay without any of the standard streams, as a service may do.
    quiet = ("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *COMMAND)
    report = replay(
        tmp_path / "report.json",
        *("--requests", 24, "--profile", profile),
        *pressure,
        *store,
        start=quiet,
    )

    assert_sound(report, 2, 24)
    assert report["bytes"]["l2_to_l1"] > 0
    assert all(pool["pages_verified"] > 0 for pool in report["pools"].values())


def tokens_of(report: Report) -> tuple[object, ...]:
    """Return a replay's token counts, which do not depend on the launcher."""
    return report["prompt_tokens"], report["computed_tokens"], report["hit_tokens"]


@pytest.mark.parametrize(
    ("start", "options"),
    [
        pytest.param(torchrun(2), (), id="torchrun by hand"),
        pytest.param(
            COMMAND,
            ("--ranks", 2, "--launcher", "ray"),
            marks=[pytest.mark.slow, needs_ray],
            id="ray actors",
        ),
    ],
)
def test_other_launchers_give_what_the_built_in_one_gives(
    tmp_path: Path, trace: Path, ours: Report, start: tuple[str, ...], options: tuple[object, ...]
) -> None:
    arguments = (trace, "--requests", 20, *ONE_AT_A_TIME, *options)

    theirs = replay(tmp_path / "theirs.json", *arguments, start=start)

    assert_sound(theirs, 2, 20)
    assert tokens_of(theirs) == tokens_of(ours)


@pytest.mark.parametrize(
    "launcher", ["torch", pytest.param("ray", marks=[pytest.mark.slow, needs_ray])]
)
def test_a_store_with_another_page_size_is_refused_in_one_line(
    trace: Path, store_of_64: str, launcher: str
) -> None:
    start = (*COMMAND, "--launcher", launcher)

    ended = run(*start, trace, "--store", store_of_64, "--requests", 4, "--page-tokens", 32)

    assert (ended.status, len(ended.error_lines), ended.err.count("\n")) == (2, 1, 1)
    assert "32" in ended.error_lines[0]
    assert "64" in ended.error_lines[0]


def test_a_store_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "file").touch()

    ended = run(*COMMAND, trace, "--store", (tmp_path / "file" / "store").as_uri())

    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert str(tmp_path / "file") in ended.err


@pytest.mark.slow
def test_bad_options_under_torchrun_are_in_its_own_report() -> None:
    ended = run(*torchrun(2), "--ranks=4")

    assert ended.status != 0
    assert ended.error_lines == []
    _, _, cause = ended.err.partition("Root Cause")
    assert ": lockstep: --ranks is 4, but 2 ranks were started" in cause


@needs_ray
def test_a_ray_cluster_that_nobody_runs_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    ended = run(*COMMAND, "--launcher", "ray", "--ray-address", f"127.0.0.1:{port}")

    assert ended.status == 2
    assert ended.err.startswith(f"lockstep: --ray-address: cannot reach Ray at 127.0.0.1:{port}: ")
    assert ended.err.count("\n") == 1


def test_ranks_that_no_launcher_started_say_each_which_settings_differ(trace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, *RANK, str(trace), "--page-tokens", page_tokens],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank, page_tokens in enumerate(["64", "32"])
    ]

    error_lines = [line for rank in ranks for line in rank.communicate(timeout=60)[1].splitlines()]

    assert [rank.returncode for rank in ranks] == [2, 2]
    assert [line.partition("different settings: ")[2] for line in error_lines] == [
        "page_tokens is 64 on rank 0, 32 on rank 1"
    ] * 2


def test_ranks_that_cannot_meet_at_an_address_are_not_started() -> None:
    status, why = run_ranks(("-c", "0"), 1, address="192.0.2.1", shutdown_timeout_s=0)

    assert status == EXIT_GROUP
    assert why.startswith("ranks cannot connect to each other at 192.0.2.1: ")


def test_a_launcher_that_may_open_too_few_files_says_so() -> None:
    with limited(resource.RLIMIT_NOFILE, 8):
        status, why = run_ranks(("-c", "0"), 1, shutdown_timeout_s=0)

    assert status == EXIT_GROUP
    assert why.startswith("the open-file limit is 8, must be at least 64")
