"""Handoff between real engines: prompts computed on two ranks continue on one rank and on two."""

from pathlib import Path

import pytest

from tests.kit.vllm.group import differences
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Output
from tests.kit.vllm.two_engines import Handing, hand_over

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()
ROUNDING = 1e-4
"""Tolerance for log-probabilities, because another number of ranks sums in another order."""


def test_what_two_ranks_have_computed_two_ranks_and_one_go_on_with_exactly(
    tmp_path: Path, model: Path, reference: list[Output]
) -> None:
    handing = Handing(model=str(model), prompts=PROMPTS, store=f"file://{tmp_path}/store")

    found = hand_over(handing, tmp_path)

    assert differences(reference, found["2"].outputs) == []
    assert differences(found["store"].outputs, found["1"].outputs) == []
    assert differences(reference, found["1"].outputs, rounding=ROUNDING) == []
    assert [each.asked_tokens - each.hit_tokens for each in found.values()] == [0, 0, 0]
