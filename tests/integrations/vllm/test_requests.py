"""Which of vLLM's requests may share pages, and what the plug-in reads of them."""

import numpy as np
import pytest

from lockstep.integrations.vllm.tracked import TrackedRequest, may_be_cached, namespace_of
from tests.kit.vllm.sent_requests import Adapter, Sent


def test_a_plain_request_shares_with_every_other_plain_request() -> None:
    assert namespace_of(Sent()) == namespace_of(Sent([1, 2])) == ""


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


def test_an_adapter_s_name_and_path_say_nothing_of_its_weights() -> None:
    requests = [Sent(lora_request=Adapter(name, f"/{name}")) for name in "ab"]

    assert len({namespace_of(request, "files 1") for request in requests}) == 1


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


def test_a_request_has_the_same_name_on_every_rank_whatever_its_id() -> None:
    """VLLM makes up part of its ids on each rank anew."""
    names = {TrackedRequest(Sent(request_id=each), 3, "", 2).name for each in ("0-af", "0-b7")}

    assert names == {"#3"}
