"""Prompts of a trace, cut into pages; page sizes must suit the size of the trace's blocks."""

import pytest

from lockstep.errors import ConfigError
from lockstep.simulation.planning.prompts import ID_BYTES, paged
from lockstep.small_engine.request import WorkloadRequest

ONE = WorkloadRequest(0, 1100, 0, (7, 8, 9))


@pytest.mark.parametrize(
    ("page_tokens", "pages"), [(16, 68), (64, 17), (512, 2), (1024, 1), (2048, 0)]
)
def test_a_prompt_has_as_many_whole_pages_as_fit(page_tokens: int, pages: int) -> None:
    (prompt,) = paged([ONE], page_tokens)

    assert (prompt.pages, prompt.usable, prompt.reserved) == (pages, pages, pages + 1)


@pytest.mark.parametrize(("page_tokens", "common"), [(64, 8), (512, 1), (1024, 0)])
def test_two_prompts_share_the_pages_of_the_blocks_that_they_share(
    page_tokens: int, common: int
) -> None:
    one, other = paged([ONE, WorkloadRequest(1, 1100, 0, (7, 5, 9))], page_tokens)

    shared = common * ID_BYTES
    assert one.ids[:shared] == other.ids[:shared]
    assert one.ids[shared : shared + ID_BYTES] != other.ids[shared : shared + ID_BYTES]


@pytest.mark.parametrize("page_tokens", [0, -1, 48, 1000])
def test_a_page_size_that_a_trace_cannot_tell_apart_is_refused(page_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"pages of {page_tokens} tokens do not fit a trace"):
        paged([ONE], page_tokens)
