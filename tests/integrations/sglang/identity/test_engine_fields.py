"""Settings excluded from the page key exist in SGLang; new settings of a release are listed (R16)."""

import json
from dataclasses import replace

import pytest

from lockstep.integrations.sglang.identity.key_exclusions import EXCLUSIONS, RESOLVED
from tests.kit.sglang.processes import last_line_of
from tests.kit.sharing.fields import compare
from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOOK = "tests.kit.sglang.fields"
KNOWN = ROOT / "tests/kit/sglang/known_fields.json"


def test_every_name_on_a_list_is_a_setting_and_new_settings_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each excluded setting exists in SGLang. New settings of a release are in the key, and printed."""
    listed = replace(EXCLUSIONS, rounding=EXCLUSIONS.rounding | RESOLVED.keys())
    found = compare(listed, json.loads(last_line_of(LOOK)), json.loads(KNOWN.read_text()))

    with capsys.disabled():
        print(*(f"\nnew in SGLang: {each}" for each in found.added), sep="")  # noqa: T201
    assert found.lacking == []
