"""`lockstep simulate-router`: a table, two claims and a report; wrong options in one line."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.launch.in_process import Run, run_lockstep


@pytest.fixture
def lockstep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs the command in this process."""
    yield from run_lockstep(monkeypatch, capfd)


def write_trace(folder: Path, requests: int) -> Path:
    path = folder / "trace.jsonl"
    lines = (
        {
            "timestamp": 3000 * (number // 10),
            "input_length": 1100 + number,
            "output_length": 1,
            "hash_ids": [0, number % 5 + 1, number % 35 + 10],
        }
        for number in range(requests)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_trace_is_routed_and_all_policies_are_told(lockstep: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    trace = write_trace(tmp_path, 300)

    status, output, errors = lockstep(
        *("simulate-router", str(trace), "--groups", "2", "--device-pages", "12"),
        *("--loads", "0.9", "--skip", "100", "--report", str(report)),
    )

    assert (status, errors) == (0, "")
    assert "is a replica's over the first 200 requests" in output
    assert "200 requests" in output
    assert all(name in output for name in ("round robin", "load", "hits", "own time", "lockstep"))
    assert "0.9 of what one group with all the memory has" in output
    written = json.loads(report.read_text(encoding="utf-8"))
    assert (written["requests"], written["groups"], written["device_pages"]) == (200, 2, 12)
    assert len(written["results"]) == 5
    assert len(written["claims"]) == 2


def test_without_a_trace_the_built_in_workload_is_routed(lockstep: Run) -> None:
    status, output, _ = lockstep("simulate-router", "--requests", "100", "--loads", "0.5")

    assert status == 0
    assert "100 requests" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--groups", "0"], "--groups is 0, must be from 1 to 256"),
        (["--device-pages", "0"], "--device-pages is 0, must be 1 or more"),
        (["--device-pages", "1"], "and a group has 1; give more"),
        (["--tokens-per-s", "0"], "--tokens-per-s is 0.0, must be 1 or more"),
        (["--attention-tokens", "-1"], "--attention-tokens is -1, must be 0 or more"),
        (["--lag-s", "-1"], "--lag-s is -1.0, must be 0 or more"),
        (["--loads", "much"], "--loads is 'much', must be numbers with commas"),
        (["--loads", "0"], "--loads has 0, must be from 0.01 to 100"),
        (["--skip", "-1"], "--skip is -1, must be 0 or more"),
        (["--requests", "1"], "--requests is 1, must be 2 or more"),
        (["--seed", "-1"], "--seed is -1, must be from 0 to"),
        (["no-such-trace.jsonl"], "cannot read the trace no-such-trace.jsonl"),
        (["--report", "/no/such/folder/r.json"], "cannot write the report"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    status, _, errors = lockstep("simulate-router", *arguments)

    assert status == 2
    assert complaint in errors
    assert errors.count("\n") == 1
