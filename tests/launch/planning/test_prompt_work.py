"""The work of a prompt is the sum over its tokens."""

import pytest

from lockstep.launch.planning.prompt_work import Attended, PromptWork


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("span", [None, 1, 8, 1000])
def test_pairs_are_counted_as_if_one_by_one(tokens: int, span: int | None) -> None:
    one_by_one = sum(min(at + 1, span or tokens) for at in range(tokens))

    assert Attended(1, span).pairs(tokens) == one_by_one


def test_the_second_half_of_a_prompt_is_more_work_than_the_first() -> None:
    work = PromptWork(weights=100, attended=(Attended(4), Attended(4, 16)))

    assert work.operations(1000) > 2 * work.operations(500) > 2 * 500 * 200
