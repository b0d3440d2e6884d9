"""Lockstep's storage in SGLang's own hands: its factory, its host pools, its transfers, on a CPU."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.programs import program
from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

POOLS = "tests.kit.sglang.hicache_pools"
STAND_INS = ROOT / "tests" / "kit" / "sglang" / "stand_ins"


def told(what: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a new process says of each layout: `answers`, and pages `moved` (read, written)."""
    finished = subprocess.run(
        program(POOLS, what, folder),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(STAND_INS),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_pages_of_one_process_are_read_by_the_next_byte_for_byte(tmp_path: Path) -> None:
    wrote = told("write", tmp_path)
    read = told("read", tmp_path)

    held = {layout: each["answers"][2:] for layout, each in wrote.items()}
    written = [[True] * 5, [True] * 2]
    assert list(held) == ["page_first", "page_first_direct", "layer_first"]
    assert wrote == {
        layout: {"answers": [*written, *each], "moved": [0, 7]} for layout, each in held.items()
    }
    # A prefix is restorable where a state ends it.
    assert read == {
        layout: {"answers": [5, [2, 5], *written, *each, True, 0], "moved": [7, 0]}
        for layout, each in held.items()
    }
