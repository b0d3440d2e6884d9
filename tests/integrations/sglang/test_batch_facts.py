"""What ranks compare of a batch: which requests, and how much of each."""

import pytest

from lockstep.integrations.sglang.batch_facts import batch_facts
from tests.kit.sglang.sent import Computed, Mode, Sent

REQUESTS = [
    Sent("a", prefix_len=4, extend_end=16, output=[7]),
    Sent("b", prefix_len=0, extend_end=None, output=[7, 8]),
]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
def test_of_a_prefill_it_is_each_request_with_what_is_there_and_what_is_computed(
    mode: str, *, each: bool
) -> None:
    facts = batch_facts(Computed(REQUESTS, Mode(mode)), each=each)

    assert facts == (mode, [["a", 4, 16], ["b", 0, 0]])


def test_of_a_decode_it_is_how_many_requests_there_are() -> None:
    assert batch_facts(Computed(REQUESTS, Mode("DECODE")), each=False) == ("DECODE", 2)


def test_of_a_decode_that_is_witnessed_it_is_each_request_and_how_far_it_is() -> None:
    facts = batch_facts(Computed(REQUESTS, Mode("DECODE")), each=True)

    assert facts == ("DECODE", [["a", 1], ["b", 2]])
