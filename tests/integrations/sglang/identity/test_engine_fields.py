"""Every field of SGLang's configuration is known: it is in the key, or proven to change no KV (R16)."""

import json
import os
import subprocess
from typing import cast

import pytest

from tests.kit.programs import program
from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.sglang.fields"
DIGESTS = "tests.kit.sglang.digests"
STAND_INS = ROOT / "tests" / "kit" / "sglang" / "stand_ins"


def run(module: str, hash_seed: int = 0) -> object:
    """Return what the last line of a program says, in a process that can import SGLang."""
    finished = subprocess.run(
        program(module),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{STAND_INS}:{os.environ.get('PYTHONPATH', '')}",
            "PYTHONHASHSEED": str(hash_seed),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return cast("object", json.loads(finished.stdout.splitlines()[-1]))


def test_every_field_is_known_to_be_in_the_key_or_proven_out() -> None:
    """What fails here is in the key. Say so in `tests.kit.sglang.keyed_fields`, or prove it out."""
    assert run(LOOK) == []


def test_the_key_follows_from_what_the_engine_came_to_and_from_nothing_else() -> None:
    """It is equal in all processes and for all TP sizes, and other where a variable is set."""
    one, other = (cast("dict[str, str]", run(DIGESTS, seed)) for seed in (1, 2))

    assert one == other
    assert one["usual"] == one["two ranks"] == one["set to its default"]
    assert len({one["usual"], one["declared"], one["undeclared"]}) == 3
