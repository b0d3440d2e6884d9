"""The example that the documentation shows: one rank's store has lost or changed pages."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "sglang_disagreeing_stores" / "run.py"
CASES = 5
SERVED = 2 + CASES
"""How often each of the two caches serves the prompts: twice at first, then in each case."""


@pytest.mark.slow
def test_lockstep_answers_rightly_whatever_one_rank_s_store_has_and_says_what_it_lacks(
    tmp_path: Path,
) -> None:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    told = [line for line in lines if line.startswith("  Lockstep ")]
    assert ["right: 12 of 12" in line for line in told] == [True] * SERVED, finished.stdout
    assert sum("rank 1 lacks page" in line for line in lines) == CASES - 1, finished.stdout
    of_hicache = [line for line in lines if line.startswith("  HiCache ")]
    assert len(of_hicache) == SERVED, finished.stdout
    assert "WRONG" in of_hicache[-1], "HiCache's store of files has checksums now: say so"
    assert not list(tmp_path.iterdir())
