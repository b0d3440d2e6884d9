"""What `contract.py` and `typings/` say of vLLM is true of the vLLM that is installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = Path(__file__).parents[1] / "vllm_contract.py"


def test_vllm_has_what_the_plug_in_uses_of_it() -> None:
    finished = subprocess.run(
        [sys.executable, str(LOOK)], capture_output=True, text=True, timeout=200, check=False
    )

    assert finished.returncode == 0, finished.stderr[-3000:]
    assert json.loads(finished.stdout.splitlines()[-1]) == []
