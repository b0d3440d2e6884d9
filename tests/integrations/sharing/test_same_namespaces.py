"""Requests of one intent have one namespace under both engines, and so the same pages."""

import pytest

from lockstep.integrations.vllm.tracked import namespace_of
from tests.kit.sglang.below_the_tree import RankBelow, RanksBelow
from tests.kit.sglang.sent import Sent as SentToSglang
from tests.kit.vllm.sent_requests import Sent as SentToVllm

WEIGHTS = "files 0123"


@pytest.fixture
def rank() -> RankBelow:
    rank = RanksBelow(1).below[0]
    rank.adapters.names = {"7f": WEIGHTS}
    return rank


@pytest.mark.parametrize("salt", [None, "a tenant"])
def test_a_tenant_s_salt_sets_apart_what_it_does_under_the_other_engine(
    rank: RankBelow, salt: str | None
) -> None:
    found = rank.namespaces.of(SentToSglang(cache_salt=salt))

    assert found == namespace_of(SentToVllm(cache_salt=salt))


def test_an_adapter_is_what_its_weights_are_under_both(rank: RankBelow) -> None:
    sent = SentToSglang(lora_id="7f", extra_key="7f", cache_salt="a tenant")

    assert rank.namespaces.of(sent) == namespace_of(SentToVllm(cache_salt="a tenant"), WEIGHTS)
