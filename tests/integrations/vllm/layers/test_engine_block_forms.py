"""Keys and values written by vLLM's kernels lie where the plug-in reads them."""

import json
from pathlib import Path

import pytest

from tests.kit.vllm.processes import last_line_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.vllm.block_forms"


def test_what_a_kernel_writes_is_found_with_its_tokens_and_elements_in_order(
    tmp_path: Path,
) -> None:
    assert json.loads(last_line_of(LOOK, tmp_path)) == []
