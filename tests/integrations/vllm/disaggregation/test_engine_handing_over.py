"""Real engines: one computes prompts on two ranks, others go on with them on one rank and on two."""

from pathlib import Path

import pytest

from tests.kit.vllm.group import differences
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import BLOCK_TOKENS, Output
from tests.kit.vllm.two_engines import Handing, hand_over

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()
ROUNDING = 1e-4
"""By how much log-probabilities may differ where another number of ranks has summed."""


def whole_pages() -> int:
    """Return how many tokens need not be computed at most."""
    return sum((len(each.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for each in PROMPTS)


def restored(outputs: list[Output]) -> int:
    return sum(each.cached_tokens for each in outputs)


def test_what_two_ranks_have_computed_two_ranks_and_one_go_on_with_exactly(
    tmp_path: Path, model: Path, reference: list[Output]
) -> None:
    handing = Handing(model=str(model), prompts=PROMPTS, store=f"file://{tmp_path}/store")

    found = hand_over(handing, tmp_path)

    assert differences(reference, found["2"]) == []
    assert differences(found["store"], found["1"]) == []
    assert [each.tokens for each in found["1"]] == [each.tokens for each in reference]
    pairs = [
        (a, b)
        for one, other in zip(found["1"], reference, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    assert max(abs(a - b) for a, b in pairs) < ROUNDING
    assert restored(found["1"]) == restored(found["2"]) == whole_pages()


def test_pages_that_one_rank_loses_on_the_way_are_computed(
    tmp_path: Path, model: Path, reference: list[Output]
) -> None:
    handing = Handing(model=str(model), prompts=PROMPTS, decode_ranks=(2,), fault="lost on the way")

    found = hand_over(handing, tmp_path)

    assert differences(reference, found["2"]) == []
    assert 0 < restored(found["2"]) < whole_pages()
