"""Settings excluded from the page key exist in vLLM, and a release's new settings are listed (R16)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.integrations.vllm.key_exclusions import EXCLUSIONS, RESOLVED
from tests.kit.sharing.fields import compare
from tests.kit.source_tree import ROOT
from tests.kit.vllm.processes import last_line_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.vllm.fields"
KNOWN = ROOT / "tests/kit/vllm/known_fields.json"


def test_every_name_on_a_list_is_a_setting_and_new_settings_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each excluded setting exists in vLLM. New settings of a release are in the key, and printed."""
    listed = replace(EXCLUSIONS, rounding=EXCLUSIONS.rounding | RESOLVED.keys())
    found = compare(listed, json.loads(last_line_of(LOOK, tmp_path)), json.loads(KNOWN.read_text()))

    with capsys.disabled():
        print(*(f"\nnew in vLLM: {each}" for each in found.added), sep="")  # noqa: T201
    assert found.lacking == []
