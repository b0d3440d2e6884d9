"""Equivalent requests have one namespace under both engines, and therefore the same pages."""

from lockstep.integrations.vllm.tracked import namespace_of
from tests.kit.sglang.host_tier_ranks import RanksBelow
from tests.kit.sglang.sent import Sent as SentToSglang
from tests.kit.vllm.sent_requests import Sent as SentToVllm

WEIGHTS = "files 0123"


def test_an_adapter_is_what_its_weights_are_under_both() -> None:
    rank = RanksBelow(1).below[0]
    rank.adapters.names = {"7f": WEIGHTS}
    sent = SentToSglang(lora_id="7f", extra_key="7f", cache_salt="a tenant")

    assert rank.namespaces.of(sent) == namespace_of(SentToVllm(cache_salt="a tenant"), WEIGHTS)
