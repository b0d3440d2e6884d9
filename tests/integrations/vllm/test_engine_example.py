"""The README's first example: one rank's store has lost a page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "disagreeing_stores"
NAIVE_LINES_MAX = 60


@pytest.mark.slow
def test_the_naive_connector_answers_wrongly_and_lockstep_rightly_and_says_why(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(EXAMPLE / "run.py")]

    finished = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    verdicts = (("naive", "WRONG"), ("lockstep", "right"), ("without", "right"))
    matches = {
        connector: [verdict in line for line in lines if line.startswith(connector)]
        for connector, verdict in verdicts
    }
    assert matches == {connector: [True, True] for connector, _ in verdicts}, finished.stdout
    [why] = [line for line in lines if "lacks page" in line]
    assert re.search(r"rank 1 lacks page [0-8] of request", why)
    assert not list(tmp_path.iterdir())


def test_the_naive_connector_is_as_short_as_it_is_said_to_be() -> None:
    lines = (EXAMPLE / "naive.py").read_text().splitlines()

    assert sum(bool(line.strip()) for line in lines) <= NAIVE_LINES_MAX
