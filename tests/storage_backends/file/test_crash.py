"""`file://` survives a writer that dies at, or between, any two system calls."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.programs import program

PROGRAM = "tests.kit.storage.crashes"


def let_writers_die(root: Path, durability: str, mode: str, seed: int, deaths: str) -> int:
    """Run writers that are killed, and print a command that repeats the run; return how many died."""
    command = program(PROGRAM, root, durability, mode, seed, deaths)
    sys.stdout.write(f"seed {seed}; replay with an empty directory: {shlex.join(command)}\n")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    sys.stdout.write(ended.stdout + ended.stderr)
    assert ended.returncode == 0
    summary = re.match(r"died (\d+), lived \d+, told \d+\n", ended.stdout)
    assert summary is not None
    return int(summary[1])


@pytest.mark.parametrize(
    ("durability", "mode", "seed"),
    [("none", "unnamed", 101), ("data", "named", 102), ("full", "unnamed", 103)],
)
def test_a_store_is_sound_and_whole_after_writers_died_at_drawn_moments(
    tmp_path: Path, durability: str, mode: str, seed: int
) -> None:
    assert let_writers_die(tmp_path / "store", durability, mode, seed, "15") >= 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["unnamed", "named"])
@pytest.mark.parametrize("durability", ["none", "data", "full"])
def test_a_store_is_sound_and_whole_after_a_writer_died_at_every_call_in_every_manner(
    tmp_path: Path, durability: str, mode: str
) -> None:
    assert let_writers_die(tmp_path / "store", durability, mode, 0, "all") >= 200
