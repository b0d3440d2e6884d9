"""Keys and values lie where the plug-in looks for them, as vLLM's own kernels write them."""

import json
from pathlib import Path

import pytest

from tests.kit.vllm.processes import Program, run_together

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.vllm.block_forms"


def test_what_a_kernel_writes_is_found_with_its_tokens_and_elements_in_order(
    tmp_path: Path,
) -> None:
    ended = run_together([Program(LOOK)], tmp_path)

    ended.check()
    assert json.loads(ended.said.splitlines()[-1]) == []
