"""Every field of vLLM's configuration is known: it is in the key, or proven to change no KV (R16)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = Path(__file__).parents[1] / "vllm_fields.py"


def test_every_field_is_known_to_be_in_the_key_or_proven_out() -> None:
    """What fails here is in the key. Say so in `vllm_keyed_fields`, or prove it out."""
    finished = subprocess.run(
        [sys.executable, str(LOOK)], capture_output=True, text=True, timeout=200, check=False
    )

    assert finished.returncode == 0, finished.stderr[-3000:]
    assert json.loads(finished.stdout.splitlines()[-1]) == []
