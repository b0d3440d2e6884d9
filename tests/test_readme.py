"""The example in the README runs as printed, and its second run is warm."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
STORE = "file:///tmp/lockstep-example"


def run_on_two_ranks(script: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"rank \d: \d+ of 100 tokens were cached", done.stdout))


@pytest.mark.distributed
def test_the_example_in_the_readme_runs_as_printed(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (example,) = [each for each in examples if STORE in each]
    script = tmp_path / "example.py"
    script.write_text(example.replace(STORE, f"file://{tmp_path}/store"))

    cold, warm = run_on_two_ranks(script), run_on_two_ranks(script)

    assert cold == [f"rank {rank}: 0 of 100 tokens were cached" for rank in (0, 1)]
    assert warm == [f"rank {rank}: 96 of 100 tokens were cached" for rank in (0, 1)]
