"""What a report says of its run, and whether one can be written, as told before a run begins."""

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.counts import Counts
from lockstep.launch.outcome import conclude
from lockstep.launch.report import RankResult, check_that_writable, make_report, shown_settings
from lockstep.launch.settings import ReplaySettings


def test_the_settings_in_a_report_have_no_secrets() -> None:
    settings = ReplaySettings(
        trace="t", store="3fs:///mount/kv?index=redis://user:s3kr1t@host:6379/0&files=4"
    )

    shown = shown_settings(settings)

    assert shown["store"] == "3fs:///mount/kv?index=redis://***@host:6379/0&files=4"
    assert "s3kr1t" not in str(shown)
    assert shown_settings(ReplaySettings(trace="t"))["store"] is None


def test_failed_operations_are_told_with_where_the_reason_stands_and_are_no_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = RankResult(
        counts=Counts(requests=1),
        refusals=[],
        steps=1,
        rounds=1,
        transport="torch",
        collectives=1,
        round_us=[],
        operations={"persist": {"failed": 2, "ok": 1}, "prefetch": {"ok": 1}},
        operations_left=0,
        violation="",
        bytes_moved=dict.fromkeys(("l1_to_l2", "l2_to_l1", "l2_to_l3", "l3_to_l2"), 0),
        storage_corrupt=0,
        digest=0,
        wall_s=1.0,
        flush_s=0.0,
    )
    report = make_report(ReplaySettings(trace="t", ranks=1), [result])

    status = conclude(report, path=None, table=True)

    said = capsys.readouterr()
    assert status == 0
    assert said.err.splitlines() == [
        "lockstep: 2 of 3 persist operations failed; see the warnings before this"
    ]
    assert " 1 rank " in said.out


def test_a_report_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for path, complaint in (
        ("/proc/report.json", "cannot write the report /proc/report.json: "),
        (str(tmp_path), "it is a directory"),
        (str(tmp_path / "no" / "report.json"), "there is no directory"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_that_writable(path)


def test_to_ask_whether_a_report_can_be_written_leaves_nothing_and_spares_an_older_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.json"
    check_that_writable(str(path))
    assert not list(tmp_path.iterdir())

    path.write_text("older")
    check_that_writable(str(path))
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
