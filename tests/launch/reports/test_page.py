"""HTML pages of a demo's report and of every other kind of report."""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.launch.cli.report_files import write_report
from lockstep.launch.replay.meanings import OF_A_REPLAY, meaning_of
from lockstep.launch.replay.outcome import rows_of
from lockstep.launch.replay.reading import page_of
from lockstep.launch.replay.report import make_report
from lockstep.launch.replay.samples import Samples
from tests.kit.launch.in_process import IN_A_PROCESS, Run, refusal
from tests.kit.launch.rank_results import result
from tests.kit.launch.replays import run

PLOTS = [
    "Hit rate: cached share of the prompt tokens",
    "Prompt tokens by the tier they came from",
    "In flight",
    "Bytes moved by rank 0",
    "Rounds: one for each step",
    "Time in Cache.step of rank 0",
    "Time in Cache.step, all ranks",
]
SAMPLES = Samples(
    seconds=[0.0, 1.0, 2.0],
    requests=[0, 1, 2],
    requests_in_system=[0, 1, 0],
    operations_in_flight=[0, 3, 0],
    prompt_tokens=[0, 40, 100],
    hit_device_tokens=[0, 0, 30],
    hit_host_tokens=[0, 10, 20],
    hit_storage_tokens=[0, 5, 10],
    rounds=[0, 10, 30],
    round_us_p50=[0.0, 100.0, 200.0],
    round_us_p99=[0.0, 1000.0, 3000.0],
    l1_to_l2_bytes=[0, 1000, 2000],
    l2_to_l1_bytes=[0, 0, 0],
    l2_to_l3_bytes=[0, 10, 20],
    l3_to_l2_bytes=[0, 10, 20],
)


def report_at(path: Path, **changes: Any) -> Path:
    report = make_report(ReplaySettings(ranks=1), [result(samples=SAMPLES)])
    write_report(str(path), {**report, **changes})
    return path


def plots_in(page: str) -> list[list[str]]:
    """Return the plot titles of each image, after checking that it is a whole SVG."""
    images = re.findall(r'<img alt="(.*?)" src="data:image/svg\+xml;base64,(.*?)">', page)
    tags = [ET.fromstring(base64.b64decode(drawn)).tag for _, drawn in images]  # noqa: S314
    assert tags == ["{http://www.w3.org/2000/svg}svg"] * page.count("<img")
    return [titles.split("; ") for titles, _ in images]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_page_of_a_demo_has_the_plots_of_both_runs(tmp_path: Path) -> None:
    page = tmp_path / "report.html"

    ended = run(*IN_A_PROCESS, "demo", "--page", page)

    assert (ended.status, ended.out.splitlines()[-1]) == (0, f"plots of both runs: {page}")
    assert plots_in(page.read_text()) == [PLOTS, PLOTS]


def test_a_page_asks_no_network_for_anything(tmp_path: Path) -> None:
    text = page_of(report_at(tmp_path / "run.json"))

    assert re.findall(r'https?://|src="(?!data:)|@import|url\(|<script', text) == []
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text


@pytest.mark.parametrize("arguments", [("report", "run.json"), ("demo", "--page", "run.html")])
def test_plots_without_matplotlib_are_refused_in_one_line(
    lockstep: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report_at(tmp_path / "run.json")

    error_line = refusal(lockstep, *arguments)

    assert "pip install 'lockstep-kv[reports]'" in error_line
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


def test_the_page_of_a_replay_has_its_plots_its_totals_and_what_they_mean(
    lockstep: Run, tmp_path: Path
) -> None:
    report = report_at(tmp_path / "run.json")

    status, out, _ = lockstep("report", report, "-o", tmp_path / "page.html")

    text = (tmp_path / "page.html").read_text()
    assert (status, out) == (0, f"wrote {tmp_path / 'page.html'}\n")
    assert plots_in(text) == [PLOTS]
    assert OF_A_REPLAY["replicas equal"] in text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["page.html", "run.json"]


def test_a_page_lies_beside_its_report_where_nothing_else_is_said(
    lockstep: Run, tmp_path: Path
) -> None:
    lockstep("report", report_at(tmp_path / "run.json"))

    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")


def test_a_report_without_samples_is_shown_without_their_plots(tmp_path: Path) -> None:
    path = report_at(tmp_path / "run.json")
    older = json.loads(path.read_text())
    del older["samples"], older["round_us_counts"]
    path.write_text(json.dumps(older))

    text = page_of(path)

    assert plots_in(text) == []
    assert "The report has no samples" in text
    assert "wall time" in text


def test_what_a_report_says_is_text_on_the_page_and_never_markup(tmp_path: Path) -> None:
    settings = {"profile": "llama", "trace": "<script>alert(1)</script>"}

    text = page_of(report_at(tmp_path / "run.json", settings=settings, violations=["<b>no</b>"]))

    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;b&gt;no&lt;/b&gt;" in text


def test_the_page_of_a_benchmark_has_its_table_and_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    numbers = ("read_gbps", "write_gbps", "limit_read_gbps", "limit_write_gbps", "ratio_read")
    more = ("ratio_write", "exists_us_per_key", "cpu_s_per_gb", "limit_cpu_s_per_gb")
    record = dict.fromkeys((*numbers, *more), 0.5)
    path.write_text(
        json.dumps({**record, "page_bytes": 4096, "threads": 2, "limit_file": "a file"})
    )

    text = page_of(path)

    assert "lockstep bench storage" in text
    assert "pages of 4,096 bytes, 2 threads" in text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{}", "is not a report that --report of `lockstep replay`"),
        ("{", "is not a report that --report of `lockstep replay`"),
        ("[" * 100_000, "is not a report that --report of `lockstep replay`"),
        ('{"round_us": 1, "hit_tokens": 2, "digests": 3}', "is incomplete or from another version"),
        ('{"cold": {}, "warm": {}}', "is incomplete or from another version"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(
    lockstep: Run, tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / "run.json").write_text(content)

    assert complaint in refusal(lockstep, "report", tmp_path / "run.json")
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nowhere/run.json"], "cannot write the report /nowhere/run.html"),
        (["/nowhere/run.json", "-o", "run.html"], "cannot read /nowhere/run.json"),
        (["run.html"], "run.html is the report itself; give another file with --output"),
    ],
)
def test_a_page_that_cannot_be_is_refused_in_one_line(
    lockstep: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert complaint in refusal(lockstep, "report", *arguments)


def test_every_row_of_the_table_has_a_meaning_and_explain_tells_them_all(lockstep: Run) -> None:
    report = make_report(ReplaySettings(profile="hybrid-all"), [result(), result()])

    status, out, _ = lockstep("replay", "--explain")

    assert [label for label, _, _ in rows_of(report) if not meaning_of(label)] == []
    assert (status, [label for label in OF_A_REPLAY if label not in out]) == (0, [])
