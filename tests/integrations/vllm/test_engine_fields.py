"""Every field of vLLM's configuration is known: it is in the key, or proven to change no KV (R16)."""

import json
from pathlib import Path

import pytest

from tests.kit.vllm.processes import said_by

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.vllm.fields"


def test_every_field_is_known_to_be_in_the_key_or_proven_out(tmp_path: Path) -> None:
    """What fails here is in the key. Say so in `tests.kit.vllm.keyed_fields`, or prove it out."""
    assert json.loads(said_by(LOOK, tmp_path)) == []
