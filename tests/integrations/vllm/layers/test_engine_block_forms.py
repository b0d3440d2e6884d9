"""Keys and values lie where the plug-in looks for them, as vLLM's own kernels write them."""

import json
import subprocess

import pytest

from tests.kit.programs import program

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.vllm.block_forms"


def test_what_a_kernel_writes_is_found_with_its_tokens_and_elements_in_order() -> None:
    finished = subprocess.run(
        program(LOOK), capture_output=True, text=True, timeout=200, check=False
    )

    assert finished.returncode == 0, finished.stderr[-3000:]
    assert json.loads(finished.stdout.splitlines()[-1]) == []
