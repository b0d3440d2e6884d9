"""What `contract.py` and `typings/` say of vLLM is true of the vLLM that is installed."""

import json
import subprocess

import pytest

from tests.kit.programs import program

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.vllm.contract"


def test_vllm_has_what_the_plug_in_uses_of_it() -> None:
    finished = subprocess.run(
        program(LOOK), capture_output=True, text=True, timeout=200, check=False
    )

    assert finished.returncode == 0, finished.stderr[-3000:]
    assert json.loads(finished.stdout.splitlines()[-1]) == []
