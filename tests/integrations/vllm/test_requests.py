"""Which of vLLM's requests may share pages, and the fields that the plug-in reads."""

import numpy as np
import pytest

from lockstep.integrations.vllm.tracked import TrackedRequest, may_be_cached, namespace_of
from tests.kit.vllm.sent_requests import Sent


def test_whatever_changes_the_kv_of_equal_tokens_sets_requests_apart() -> None:
    requests = [
        Sent(),
        Sent(cache_salt="a"),
        Sent(cache_salt="b"),
    ]

    names = [
        *(namespace_of(request) for request in requests),
        *(namespace_of(Sent(), weights) for weights in ("files 1", "files 2")),
        namespace_of(Sent(cache_salt="a"), "files 1"),
    ]

    assert len(set(names)) == len(names)


def test_requests_whose_tokens_do_not_say_what_they_are_are_left_alone() -> None:
    assert may_be_cached(Sent())
    assert not may_be_cached(Sent(prompt_embeds=object()))
    assert not may_be_cached(Sent(resumable=True))


@pytest.mark.parametrize(
    ("length", "loadable"), [(0, 0), (1, 0), (32, 0), (33, 32), (64, 32), (65, 64), (100, 96)]
)
def test_the_last_token_of_a_prompt_is_always_computed(length: int, loadable: int) -> None:
    tracked = TrackedRequest(Sent(list(range(length))), 1, "", 32)

    assert tracked.loadable_tokens == loadable


def test_tokens_are_read_once_and_grow_with_the_output() -> None:
    request = Sent([5, 6, 7])
    tracked = TrackedRequest(request, 1, "", 2)

    assert np.frombuffer(tracked.head(2), dtype="<i4").tolist() == [5, 6]
    request.all_token_ids += [8, 9]
    assert np.frombuffer(tracked.head(5), dtype="<i4").tolist() == [5, 6, 7, 8, 9]
    assert np.frombuffer(tracked.head(1), dtype="<i4").tolist() == [5]
