"""Every field of SGLang's configuration is known: it is in the key, or proven to change no KV (R16)."""

import json
import os
import subprocess

import pytest

from tests.kit.programs import program
from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.sglang.fields"
STAND_INS = ROOT / "tests" / "kit" / "sglang" / "stand_ins"


def test_every_field_is_known_to_be_in_the_key_or_proven_out() -> None:
    """What fails here is in the key. Say so in `tests.kit.sglang.keyed_fields`, or prove it out."""
    finished = subprocess.run(
        program(LOOK),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{STAND_INS}:{os.environ.get('PYTHONPATH', '')}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )

    assert finished.returncode == 0, finished.stderr[-3000:]
    assert json.loads(finished.stdout.splitlines()[-1]) == []
