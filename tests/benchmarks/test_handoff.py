"""`lockstep bench handoff`: its report and its output, but not the measured numbers."""

import json
import subprocess
from pathlib import Path

import pytest

from lockstep.benchmarks.handoff.report import HandoffReport
from tests.kit.launch.in_process import IN_A_PROCESS, Run
from tests.kit.servers.mooncake_master import needs_mooncake

PATIENCE_S = 120.0


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a new process, because it starts both of its ranks as child processes."""
    line = [*IN_A_PROCESS, "bench", "handoff", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("page_bytes", "pages"),
    [
        ("64KiB", 65536),
        pytest.param("1", 1, marks=pytest.mark.slow),
        pytest.param("5000000", 5000000, marks=pytest.mark.slow),
    ],
)
def test_the_report_has_every_figure(tmp_path: Path, page_bytes: str, pages: int) -> None:
    path = tmp_path / "handoff.json"

    ended = bench(
        "--page-bytes", page_bytes, "--bytes", str(3 * pages), "--rounds", "2", "--report", path
    )

    assert ended.returncode == 0, ended.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert set(report) == set(HandoffReport.__annotations__)
    assert (report["page_bytes"], report["bytes"], report["rounds"]) == (pages, 3 * pages, 2)
    assert report["ratio"] == pytest.approx(report["handoff_gbps"] / report["limit_gbps"])
    assert report["authenticated_ratio"] == pytest.approx(
        report["authenticated_gbps"] / report["handoff_gbps"]
    )
    assert "host to host, authenticated" in ended.stdout


@pytest.mark.distributed
def test_a_transfer_engine_is_measured_beside_the_same_limit(tmp_path: Path) -> None:
    needs_mooncake()
    path = tmp_path / "handoff.json"
    size = ("--page-bytes", "64KiB", "--bytes", "1MiB", "--rounds", "1")

    ended = bench(*size, "--transfer", "mooncake", "--report", path)

    assert ended.returncode == 0, ended.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["transfer"], report["page_bytes"]) == ("mooncake", 65536)
    assert report["limit_gbps"] > 0
    assert report["authenticated_gbps"] is None
    assert "host to host, by mooncake" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--page-bytes", "0"], "--page-bytes. Must be >= 1"),
        (["--page-bytes", "9", "--bytes", "8"], "--bytes is 8, must be 9 or more"),
        (["--page-bytes", "9", "--rounds", "0"], "--rounds. Must be >= 1"),
        (["--page-bytes", "4096", "--bytes", str(1 << 50)], "which needs twice as much memory"),
        (["--page-bytes", "9", "--transfer", "udp"], '--transfer. Choose from: "tcp", "mooncake"'),
        (["--page-bytes", "8kB"], "--page-bytes: '8kB' is not a size; give a number"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    status, _, error = lockstep("bench", "handoff", *arguments)

    assert status == 2
    assert complaint in error
    assert error.count("\n") == 1
