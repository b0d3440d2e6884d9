"""`lockstep doctor` on this machine, run by people and by scripts."""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lockstep.launch.doctor.doctor_command import WIDTH, lines_of
from lockstep.launch.doctor.finding import CheckResult, Status
from lockstep.launch.doctor.network import Interface, probe_gloo
from lockstep.launch.doctor.software import probe_packages
from lockstep.launch.doctor.store import (
    judge_room,
    of_rank_0,
    probe_answers,
    probe_direct,
    probe_speed,
)
from tests.kit.launch.in_process import IN_A_PROCESS, Run, refusal
from tests.kit.launch.replays import run

NOBODY = 65534


@pytest.mark.distributed
@pytest.mark.parametrize("as_json", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_doctor_tells_all_that_it_has_probed_and_leaves_nothing(
    tmp_path: Path, as_json: bool
) -> None:
    store = tmp_path / "kv"

    ended = run(
        *(*IN_A_PROCESS, "doctor", "--store", store.as_uri(), "--ranks", "1"),
        *["--json"] * as_json,
    )

    probed = ("Python", "torch", "gloo", "kernel calls", "O_DIRECT", "store room", "store answers")
    assert (ended.status, ended.err) == (0, "")
    assert [name for name in probed if name not in ended.out] == []
    assert not as_json or json.loads(ended.out)["status"] in ("ok", "advice")
    assert list(tmp_path.iterdir()) == []


def test_gloo_at_an_interface_that_this_machine_does_not_have_is_told_in_one_line() -> None:
    # 203.0.113.0/24 is reserved for documentation, so no machine has this address.
    failed = probe_gloo(Interface("eth9", "203.0.113.7", ""))

    assert failed.failure
    assert "\n" not in failed.failure


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "0"], "--ranks. Must be >= 1"),
        (["--store", "/var/kv"], "--store is '/var/kv', which is not a URI"),
        (["--store", "ftp://host/kv"], "unknown scheme 'ftp'"),
    ],
)
def test_options_that_are_wrong_get_one_line_and_status_2(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    assert complaint in refusal(lockstep, "doctor", *arguments)


def test_a_store_that_cannot_be_opened_is_a_problem_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")

    answers = probe_answers((tmp_path / "kv").as_uri())

    assert "kv" in answers.failure


def test_a_store_in_memory_answers_and_keeps_what_it_is_given() -> None:
    answers = probe_answers("memory://")
    speed = probe_speed("memory://", lambda _: None, total_bytes=2 << 20)

    assert (answers.failure, answers.read_us > 0) == ("", True)
    assert speed is not None
    assert speed.failure == ""
    assert speed.read_gbps > 0


def test_a_store_of_another_group_is_only_connected_to() -> None:
    answers = probe_answers("peer://127.0.0.1:1")

    assert "refused" in answers.failure
    assert probe_speed("peer://127.0.0.1:1", lambda _: None) is None


def test_direct_reads_are_tried_where_the_store_would_be_made(tmp_path: Path) -> None:
    direct = probe_direct(f"{(tmp_path / 'not' / 'yet').as_uri()}?direct=1")

    assert direct is not None
    assert (direct.directory, direct.wanted) == (str(tmp_path), True)
    assert list(tmp_path.iterdir()) == []
    assert probe_direct("memory://") is None


@contextmanager
def nobodys_rights_in(folder: Path) -> Generator[None]:
    """Remove this process's access to a folder in a `with` block, even if the process is root."""
    mine = os.geteuid()
    folder.chmod(0)
    try:
        os.seteuid(NOBODY if mine == 0 else mine)
        yield
    finally:
        os.seteuid(mine)
        folder.chmod(0o700)


def test_a_place_in_which_nothing_may_be_made_or_removed_is_told_as_such() -> None:
    """The doctor reports "Permission denied" for a folder in which its probe has no access rights."""
    with TemporaryDirectory(dir="/tmp") as folder, nobodys_rights_in(Path(folder)):
        direct = probe_direct(f"file://{folder}")

    assert direct is not None
    assert (direct.directory, direct.failure) == (folder, "Permission denied")


@pytest.mark.parametrize(
    ("uri", "status", "text"),
    [
        (
            "file:///kv/{rank}",
            Status.OK,
            "half of its filesystem's free space, with its own files counted as free; ",
        ),
        ("metrics+file:///kv?quota_gib=7", Status.OK, "the store may hold 7.0 GiB (its quota)"),
        ("file:///kv?quota_gib=0", Status.ADVICE, "its whole filesystem"),
    ],
)
def test_it_is_told_how_much_a_store_of_files_may_hold(
    tmp_path: Path, uri: str, status: Status, text: str
) -> None:
    (found,) = judge_room(uri, str(tmp_path))

    assert found.status is status
    assert text in found.seen


@pytest.mark.parametrize("uri", ["3fs:///kv?index=sqlite:///kv/index.db", "file:///kv?read_only=1"])
def test_of_other_stores_their_room_is_not_told(uri: str) -> None:
    assert judge_room(uri, "/") == []


def test_the_store_of_the_first_rank_is_tried_and_not_swept() -> None:
    uri = "file:///kv/{rank}?quota_gib=1&threads=2"
    assert of_rank_0(uri) == "file:///kv/0?threads=2&quota_gib=0"


def test_packages_are_those_of_the_extras_and_torch() -> None:
    found = {each.name: each.extra for each in probe_packages()}

    assert (found["torch"], found["obstore"], found["vllm"]) == ("", "s3", "vllm")
    assert {"numpy", "ruff", "pytest"} & found.keys() == set()


def test_a_long_finding_is_folded_under_its_own_column() -> None:
    findings = [
        CheckResult("gloo", Status.PROBLEM, "word " * 40, "do " * 40),
        CheckResult("python", Status.OK, "3.13"),
    ]

    lines = lines_of(findings)

    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("problem gloo            word word")
    assert lines[1].startswith(" " * 24 + "word")
    assert lines[-1] == "1 problem, 0 with advice, of 2 findings"
