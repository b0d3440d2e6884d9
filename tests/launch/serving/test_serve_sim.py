"""Groups of real processes serve a workload together: each request is handed over, each page right."""

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from lockstep.launch.serving.report import ServeReport
from tests.kit.launch.replays import BIN, run, start
from tests.kit.servers.mooncake_master import needs_mooncake
from tests.kit.telemetry.trace_file import TraceFile

pytestmark = pytest.mark.distributed

SERVE = (str(BIN / "lockstep"), "serve-sim")
LONG = ("--patience-s", 600)
"""Nobody waits for a group that is known to be gone: to do so would take longer than a test may."""
SMALL = ("--requests", 12, "--speed", 30, "--device-pages", 512, "--host-pages", 2048)


def serve(report: Path, *options: object) -> ServeReport:
    """Serve, and return the report; the command must not have found any fault."""
    ended = run(*SERVE, *SMALL, *options, "--report", report)
    assert ended.status == 0, ended.err
    return cast("ServeReport", json.loads(report.read_text(encoding="utf-8")))


def assert_sound(report: ServeReport, requests: int = 12) -> None:
    assert (report["requests"], report["refused"]) == (requests, 0)
    handoffs = report["handoffs"]
    ways = (handoffs["ok"], handoffs["refetched"], handoffs["resent"], handoffs["recomputed"])
    assert sum(ways) >= requests
    assert report["pages_corrupt"] == report["operations_left"] == 0
    assert report["violations"] == []
    assert report["pages_verified"] > 0
    assert [len(set(each["digests"])) for each in report["groups"].values()] == [
        1 for _ in report["groups"]
    ]


def test_two_groups_of_two_hand_every_request_over_directly(tmp_path: Path) -> None:
    report = serve(tmp_path / "report.json", "--profile", "hybrid-all")

    assert_sound(report)
    assert report["handoffs"]["ok"] >= 11
    assert report["handoff_ms"]["p99"] >= report["handoff_ms"]["p50"] > 0
    assert 0 < report["router_hit_ratio"] < 1
    assert report["groups_lost"] == []
    assert list(report["groups"]) == ["prefill-0", "decode-0"]


@pytest.mark.slow
def test_groups_of_two_sizes_hand_over_by_mooncake_s_transfer_engine(tmp_path: Path) -> None:
    needs_mooncake()
    shapes = ("--prefill", "1x2", "--decode", "1x1", "--profile", "hybrid-all")
    report = serve(tmp_path / "report.json", *shapes, "--transfer", "mooncake")

    assert_sound(report)
    assert report["handoffs"]["ok"] >= 11


def test_groups_of_two_sizes_hand_over_by_a_store(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    shapes = ("--prefill", "1x2", "--decode", "1x1", "--profile", "hybrid-all")
    drawn = ("--timeline", tmp_path / "timeline.json")
    report = serve(tmp_path / "report.json", *shapes, "--store", store, *drawn)

    assert_sound(report)
    assert report["handoffs"]["ok"] >= 11
    timeline = TraceFile.read(tmp_path / "timeline.json")
    assert list(timeline.processes.values()) == [
        "prefill-0 rank 0",
        "prefill-0 rank 1",
        "decode-0 rank 0",
    ]
    assert timeline.bytes_moved() == {
        way: sum(group["bytes"][way] for group in report["groups"].values())  # type: ignore[literal-required]
        for way in timeline.bytes_moved()
    }


@pytest.mark.slow
def test_requests_of_a_group_that_is_killed_are_served_all_the_same(tmp_path: Path) -> None:
    shapes = ("--prefill", "2x1", "--decode", "1x2", "--kill", "prefill-0@4", *LONG)
    report = serve(tmp_path / "report.json", *shapes)

    assert_sound(report)
    assert report["groups_lost"] == ["prefill-0"]
    assert list(report["groups"]) == ["prefill-1", "decode-0"]


def test_where_the_only_group_that_prefills_is_killed_the_other_computes(tmp_path: Path) -> None:
    shapes = ("--prefill", "1x1", "--decode", "1x1", "--kill", "prefill-0@4", *LONG)
    report = serve(tmp_path / "report.json", *shapes)

    assert (report["requests"], report["pages_corrupt"]) == (12, 0)
    assert report["groups_lost"] == ["prefill-0"]


def test_requests_of_a_killed_group_that_decodes_begin_anew_in_another(tmp_path: Path) -> None:
    shapes = ("--prefill", "1x1", "--decode", "2x1", "--kill", "decode-0@2", *LONG)
    report = serve(tmp_path / "report.json", *shapes, "--output-tokens-max", 100)

    assert (report["requests"], report["pages_corrupt"]) == (12, 0)
    assert report["groups_lost"] == ["decode-0"]


def test_where_no_group_is_left_the_report_has_what_was_served_before(tmp_path: Path) -> None:
    shapes = ("--prefill", "1x1", "--decode", "1x1", "--kill", "decode-0@2")
    path = tmp_path / "report.json"

    ended = run(*SERVE, *SMALL, *shapes, "--output-tokens-max", 100, "--report", path)

    report = json.loads(path.read_text(encoding="utf-8"))
    assert ended.status == 3
    assert "requests cannot be served any more" in ended.said[-1]
    assert "lockstep: group decode-0 was lost" in ended.said
    assert 2 <= report["requests"] < 12
    assert report["groups_lost"] == ["decode-0"]


def test_ctrl_c_ends_every_rank_of_every_group(tmp_path: Path) -> None:
    with ExitStack() as opened:
        errors = opened.enter_context((tmp_path / "errors").open("w+", encoding="utf-8"))
        serving = start(errors, *SERVE, "--prefill", "1x1", "--decode", "1x1")
        opened.callback(serving.kill)
        serving.wait_until(lambda: len(serving.seen) >= 2)
        serving.process.send_signal(signal.SIGINT)
        status = serving.process.wait(60)
        survivors, said = serving.survivors_after(10), serving.said()

    assert (status, survivors) == (130, [])
    assert said == "lockstep: interrupted\n"


def test_a_group_that_cannot_start_ends_all_in_one_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = f"{(tmp_path / 'file').as_uri()}/store"

    ended = run(*SERVE, "--prefill", "1x1", "--decode", "1x1", "--store", store)

    assert ended.status == 3
    assert len([line for line in ended.said if "store" in line]) in {1, 2}
    assert ended.said[-1].startswith("lockstep: not all groups have started: ")
    assert "Traceback" not in ended.err
