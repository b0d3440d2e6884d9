"""Requests share a namespace, except requests whose KV differs although their tokens are equal."""

import pytest

from lockstep.coordinator.divergence import first_difference
from tests.kit.sglang.host_tier_ranks import RankBelow, RanksBelow
from tests.kit.sglang.sent import Sent

PROMPT = [1, 2, 3, 4]


@pytest.fixture
def rank() -> RankBelow:
    return RanksBelow(1).below[0]


def test_a_plain_request_shares_with_every_other_plain_request(rank: RankBelow) -> None:
    assert rank.namespaces.of(Sent("a", PROMPT)) == rank.namespaces.of(Sent("b")) == ""
    assert rank.namespaces.of(Sent(cache_salt="", extra_key="")) == ""


def test_whatever_changes_the_kv_of_equal_tokens_sets_requests_apart(rank: RankBelow) -> None:
    rank.adapters.names = {"7f": "files a", "8e": "files b"}
    requests = [
        Sent(),
        Sent(cache_salt="a"),
        Sent(extra_key="a"),
        Sent(cache_salt="b"),
        Sent(extra_key="a", cache_salt="b"),
        Sent(lora_id="7f", extra_key="7f"),
        Sent(lora_id="8e", extra_key="8e"),
        Sent(lora_id="7f", extra_key="a7f"),
        Sent(lora_id="7f", extra_key="7f", cache_salt="a"),
    ]
    names = [rank.namespaces.of(each) for each in requests]
    rank.namespaces.weights = "version 2"
    names += [rank.namespaces.of(each) for each in requests]
    rank.namespaces.cleared = "life 1"
    names += [rank.namespaces.of(each) for each in requests]

    assert None not in names
    assert len(set(names)) == len(names)


def test_an_adapter_that_was_loaded_again_is_the_same_under_its_new_id(rank: RankBelow) -> None:
    rank.adapters.names = {"7f": "files a", "8e": "files a"}

    names = {rank.namespaces.of(Sent(lora_id=each, extra_key=each)) for each in ("7f", "8e")}

    assert len(names) == 1


def test_requests_whose_tokens_do_not_say_what_they_are_are_left_alone(rank: RankBelow) -> None:
    before = rank.host.inspection.digest

    assert rank.namespaces.of(Sent(input_embeds=object())) is None
    assert rank.namespaces.of(Sent(positional_embed_overrides=object())) is None
    assert rank.host.inspection.digest == before


def test_a_rank_that_cannot_read_an_adapter_is_named_with_the_remedy() -> None:
    below = RanksBelow()
    below.below[0].adapters.names = {"7f": "files a"}

    found = [each.namespaces.of(Sent(lora_id="7f", extra_key="7f")) for each in below.below]

    journals = [each.inspection.journal.last(9) for each in below.ranks.caches]
    difference = first_difference(journals) or ""
    assert [each is None for each in found] == [False, True]
    assert "rank 0: engine adapter of a request is files a" in difference
    assert "rank 1: engine adapter of a request is not known on this rank" in difference
    assert "adapter_versions" in difference
