"""`contract.py` and `typings/` match the installed vLLM."""

import json
from pathlib import Path

import pytest

from tests.kit.vllm.processes import last_line_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.vllm.contract"


def test_vllm_has_what_the_plug_in_uses_of_it(tmp_path: Path) -> None:
    assert json.loads(last_line_of(LOOK, tmp_path)) == []
