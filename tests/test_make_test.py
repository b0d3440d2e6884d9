"""`make test` runs pytest on a monotonic clock that starts at 0, with a hash seed that it prints."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.kit.source_tree import ROOT

SCRIPT = ROOT / "tests" / "kit" / "just_booted.sh"
REFUSED = "#!/bin/sh\nexit 1\n"
GRANTED = '#!/bin/sh\necho "$@"\n'
"""A fake `unshare` that succeeds and prints its arguments."""


def on_a_new_clock(folder: Path, unshare: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `just_booted.sh` on a command; `unshare` is the source text of a fake `unshare` program."""
    stand_in = folder / "unshare"
    stand_in.write_text(unshare, encoding="utf-8")
    stand_in.chmod(0o755)
    return subprocess.run(
        [SCRIPT, *command],
        check=False,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


def test_tests_run_on_a_clock_that_has_just_begun(tmp_path: Path) -> None:
    done = on_a_new_clock(tmp_path, GRANTED, "pytest", "tests with spaces")

    last_line = done.stdout.splitlines()[-1]
    assert last_line.startswith("--time --monotonic -")
    assert last_line.endswith(" pytest tests with spaces")
    assert not done.stderr


@pytest.mark.parametrize("status", [0, 5])
def test_without_the_right_to_it_they_run_on_the_machine_s_and_one_line_says_so(
    tmp_path: Path, status: int
) -> None:
    done = on_a_new_clock(tmp_path, REFUSED, "sh", "-c", f"echo ran; exit {status}")

    assert done.returncode == status
    assert done.stdout == "ran\n"
    assert len(done.stderr.splitlines()) == 1
    assert "the tests use the machine's" in done.stderr


def hash_seeds(*arguments: str) -> list[str]:
    """Return the hash seeds with which `make test`, given these arguments, would run pytest."""
    done = subprocess.run(
        ["make", "--dry-run", "test", *arguments],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return re.findall(r"PYTHONHASHSEED=(\d+) .* -m pytest", done.stdout)


def test_the_order_of_sets_is_drawn_once_for_all_tests_and_can_be_had_again() -> None:
    first, second = hash_seeds()

    assert first == second
    assert hash_seeds("HASH_SEED=7") == ["7", "7"]
