"""The examples in the README run as printed, and their second runs are warm."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.snippets import blocks_of
from tests.kit.source_tree import ROOT

PROGRAMS = [
    block.text
    for block in blocks_of("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))
    if block.language == "python" and block.note == "tests/test_readme.py"
]
STORE = re.compile(r"file:///tmp/lockstep-\w+")


def run_on_two_ranks(script: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"rank \d: \d+ of 100 tokens were cached", done.stdout))


def cold_and_warm(program: str, folder: Path) -> list[list[str]]:
    script = folder / "example.py"
    script.write_text(STORE.sub(f"file://{folder}/store", program))
    return [run_on_two_ranks(script), run_on_two_ranks(script)]


COLD_AND_WARM = [
    [f"rank {rank}: {cached} of 100 tokens were cached" for rank in (0, 1)] for cached in (0, 96)
]


@pytest.mark.distributed
def test_the_example_in_the_readme_runs_as_printed(tmp_path: Path) -> None:
    example, _, _ = PROGRAMS

    assert cold_and_warm(example, tmp_path) == COLD_AND_WARM


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_runs_with_windows_and_states_as_the_readme_says(tmp_path: Path) -> None:
    example, hybrid, chunks = PROGRAMS
    start, rest = example.split("layout = ", 1)
    _, rest = rest.split("Cache.open(", 1)
    middle, end = rest.split("prompt = ", 1)
    assert middle.endswith("**pools))\n")
    opened = f"{start}{hybrid}\ncache = Cache.open(config)\nprompt = {end}"
    program = opened.replace('cache.insert("r1", prompt)  # share', f"{chunks}\n# share")

    assert cold_and_warm(program, tmp_path) == COLD_AND_WARM
