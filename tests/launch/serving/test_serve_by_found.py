"""A workload is served by groups that somebody else has started."""

import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import pytest

from lockstep.errors import ConfigError, PeerLost
from lockstep.launch.report import Report, read_report
from lockstep.launch.serving.directories import host_towards
from lockstep.launch.serving.found import FoundGroup
from lockstep.launch.serving.front import Front
from lockstep.launch.serving.launching import open_lines
from lockstep.launch.serving.result import GroupResult
from lockstep.ranks.disaggregation.dispatcher import Terms
from lockstep.ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from tests.kit.launch.replays import Running, run, start
from tests.launch.serving.test_serve_sim import SERVE, assert_sound, serve

RANK = (sys.executable, "-m", "lockstep.launch.serving.process")
SIZES = ("--device-pages", 512, "--host-pages", 2048)
TERMS = Terms(model_digest=bytes(32), page_tokens=16, tokens_max=1024)
ONE_RANK_EACH = ("--prefill", "1x1", "--decode", "1x1")


def place_of_one() -> dict[str, str]:
    """What torchrun tells the only rank of a group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": "0", "WORLD_SIZE": "1", **place}


def begin(opened: ExitStack, place: Path, role: str, *options: object) -> Running:
    """Start a group of one rank, which registers in a file."""
    errors = opened.enter_context((place / role).open("w+", encoding="utf-8"))
    named = ("--role", role, "--name", f"my-{role}", "--directory", place / "groups.db")
    group = start(errors, *RANK, *named, *SIZES, *options, **place_of_one())
    opened.callback(group.kill)
    return group


@pytest.mark.distributed
def test_groups_that_were_started_by_hand_serve_hand_in_and_end(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    with ExitStack() as opened:
        groups = [
            begin(opened, tmp_path, "prefill"),
            begin(opened, tmp_path, "decode", "--report", own),
        ]
        found = ("--groups-from", tmp_path / "groups.db")
        report = serve(tmp_path / "report.json", *ONE_RANK_EACH, *found)
        statuses = [each.process.wait(60) for each in groups]

    assert_sound(report)
    assert list(report["groups"]) == ["my-prefill", "my-decode"]
    assert report["groups"]["my-decode"] == read_report(own)
    assert statuses == [0, 0]


@pytest.mark.distributed
@pytest.mark.slow
def test_groups_of_another_layout_are_refused_by_name_and_go_on(tmp_path: Path) -> None:
    with ExitStack() as opened:
        begin(opened, tmp_path, "prefill", "--page-tokens", 32)
        group = begin(opened, tmp_path, "decode", "--page-tokens", 32)
        ended = run(*SERVE, *ONE_RANK_EACH, "--groups-from", tmp_path / "groups.db")
        status = group.process.poll()

    assert ended.status == 2
    assert len(ended.said) == 1
    assert ended.said[0].startswith("lockstep: group my-prefill has pages of another layout; ")
    assert status is None


@pytest.mark.parametrize("named", ["10.0.0.1", "host-a", "0.0.0.0"])  # noqa: S104 - is refused.
def test_an_address_that_others_reach_needs_a_secret(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.delenv("LOCKSTEP_SECRET", raising=False)

    with pytest.raises(ConfigError, match=f"reach this one at {named}: set LOCKSTEP_SECRET"):
        host_towards("redis://10.0.0.9:6379/0", named)


def test_an_address_is_the_one_from_which_the_directory_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_SECRET", "0123456789abcdef")

    assert host_towards("redis://127.0.0.1:6379/0", "") == "127.0.0.1"
    assert host_towards("groups.db", "") == "127.0.0.1"
    assert host_towards("redis://127.0.0.1:6379/0", "10.0.0.1") == "10.0.0.1"


def test_groups_that_end_at_once_are_all_named() -> None:
    nothing = GroupResult(
        report=cast("Report", {}), handoffs={}, manifests_refused={}, departures={}
    )
    with open_lines("127.0.0.1", "") as lines, closing(EmbeddedDirectory()) as directory:
        directory.open()
        lines.results.update({"one": nothing, "other": nothing})
        groups = [FoundGroup(name, lines.results) for name in ("one", "other")]
        front = Front(groups, directory, TERMS, lines, concurrency=1, outputs_max=1)

        with pytest.raises(PeerLost, match="not all groups have started: one, other"):
            front.wait_for_groups()
