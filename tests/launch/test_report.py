"""What a report says of its run, and whether one can be written, as told before a run begins."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.launch.outcome import conclude, table_of
from lockstep.launch.report import (
    RankResult,
    check_that_writable,
    faults_of,
    make_report,
    read_report,
    shown_settings,
    write_report,
)
from lockstep.launch.settings import ReplaySettings
from lockstep.small_engine.counts import PoolCounts, ReplayCounts
from tests.kit.launch.rank_results import result


def test_the_settings_in_a_report_have_no_secrets() -> None:
    settings = ReplaySettings(
        trace="t", store="3fs:///mount/kv?index=redis://user:s3kr1t@host:6379/0&files=4"
    )

    shown = shown_settings(settings)

    assert shown["store"] == "3fs:///mount/kv?index=redis://***@host:6379/0&files=4"
    assert "s3kr1t" not in str(shown)
    assert shown_settings(ReplaySettings(trace="t"))["store"] is None


def test_a_rank_hands_in_its_result_unchanged() -> None:
    assert RankResult.unpack(result().pack()) == result()


def test_the_report_takes_equal_counts_once_and_adds_bytes_and_pages(tmp_path: Path) -> None:
    settings = ReplaySettings(ranks=1, device_pages=4000, host_pages=4000)
    report = make_report(settings, [result(), result(round_us=[5.0])])
    write_report(str(tmp_path / "report.json"), report)

    assert read_report(tmp_path / "report.json") == report
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]
    assert report["prompt_tokens"] == 100
    assert report["bytes"] == {"l1_to_l2": 2, "l2_to_l1": 4, "l2_to_l3": 6, "l3_to_l2": 8}
    told = {name: report[name] for name in ("retractions", "resumes", "resumes_from_storage")}
    assert told == {"retractions": 4, "resumes": 3, "resumes_from_storage": 2}
    assert report["preempted"] == 1
    assert report["pools"] == {
        "kv": {
            "device_pages": 4000,
            "host_pages": 4000,
            "page_bytes": 64 * 256,
            "pages_verified": 10,
            "pages_rechecked": 14,
            "pages_corrupt": 0,
        }
    }
    assert report["pages_verified"] == 10
    assert report["round_us"]["p50"] == 3.0
    assert faults_of(report) == []


def test_corrupt_pages_and_unequal_replicas_are_faults() -> None:
    settings = ReplaySettings(profile="hybrid-all")
    corrupt = ReplayCounts(
        pools={"window": PoolCounts(pages_corrupt=2), "state": PoolCounts(pages_corrupt=1)}
    )

    report = make_report(settings, [result(counts=corrupt), result(digest=0x5678)])

    assert faults_of(report) == [
        "3 pages held wrong bytes: 2 in pool window, 1 in pool state",
        "the replicas differ: digests 0000000000001234, 0000000000005678",
    ]


def test_operations_that_did_not_end_and_pages_that_leaked_are_faults() -> None:
    leaked = "invariant 7: page 3 of kv is in no place"
    results = [result(operations_left=2, violation=leaked), result(violation=leaked)]
    report = make_report(ReplaySettings(), results)

    assert faults_of(report) == ["2 operations had not ended at the end", leaked]


def test_failed_operations_are_told_with_where_the_reason_stands_and_are_no_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    operations = {"persist": {"failed": 2, "ok": 1}, "prefetch": {"ok": 1}}
    report = make_report(ReplaySettings(trace="t", ranks=1), [result(operations=operations)])

    status = conclude(report, path=None, table=True)

    said = capsys.readouterr()
    assert status == 0
    assert said.err.splitlines() == [
        "lockstep: 2 of 3 persist operations failed; see the warnings before this"
    ]
    assert " 1 rank " in said.out


@pytest.mark.parametrize(
    ("counts", "status"),
    [
        (ReplayCounts(requests=2), 0),
        (ReplayCounts(requests=1, refused=1), 5),
        (ReplayCounts(refused=1), 5),
        (ReplayCounts(requests=1, refused=1, pools={"kv": PoolCounts(pages_corrupt=1)}), 1),
    ],
)
def test_the_status_tells_requests_that_were_refused_from_wrong_pages(
    counts: ReplayCounts, status: int
) -> None:
    report = make_report(ReplaySettings(ranks=1), [result(counts=counts)])

    assert conclude(report, path=None, table=False) == status


@pytest.mark.parametrize(
    ("trace", "first_line"),
    [
        (
            "t.jsonl",
            "5 requests in the system at a time (--concurrency); the trace's timestamps are not used",
        ),
        (None, "5 requests in the system at a time (--concurrency)"),
    ],
)
def test_the_first_line_says_when_requests_entered(
    capsys: pytest.CaptureFixture[str], trace: str | None, first_line: str
) -> None:
    report = make_report(ReplaySettings(ranks=1, concurrency=5, trace=trace), [result()])

    conclude(report, path=None, table=True)

    assert capsys.readouterr().out.splitlines()[0] == first_line


def test_the_table_says_what_its_times_are_and_keeps_each_label_on_one_line() -> None:
    report = make_report(ReplaySettings(ranks=1), [result(round_us=[1500.0])])
    console = Console(width=60, record=True, file=io.StringIO())

    console.print(table_of({"cold": report, "warm": report}))

    rows = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "│" in line]
    said = {label.strip(): value.strip() for label, value, _ in rows}
    assert said["time in Cache.step p50"] == "1,500 us"
    assert said["operations left at the end"] == "0"


def test_of_an_interrupted_replay_only_wrong_pages_are_faults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = ReplayCounts(pools={"kv": PoolCounts(pages_corrupt=3)})
    results = [result(counts=wrong, operations_left=4), result(digest=0x5678)]

    report = make_report(ReplaySettings(), results, interrupted=True)
    status = conclude(report, path=None, table=True)

    said = capsys.readouterr()
    assert status == 130
    assert said.err == "lockstep: 3 pages held wrong bytes: 3 in pool kv\n"
    assert " 2 ranks, interrupted " in said.out
    assert " not compared " in said.out


def test_a_report_says_how_often_the_store_timed_out_and_how_long_was_waited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    late = result(storage_late_calls=2, storage_waited_s=1.5)
    report = make_report(ReplaySettings(trace="t", ranks=2), [late, late])

    conclude(report, path=None, table=True)

    assert (report["storage_late_calls"], report["storage_waited_s"]) == (4, 3.0)
    rows = [
        re.findall(r"[^│ ]+(?: [^│ ]+)*", line) for line in capsys.readouterr().out.splitlines()
    ]
    assert ["storage calls that timed out", "4"] in rows
    assert ["waited for them", "3.0 s"] in rows


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
