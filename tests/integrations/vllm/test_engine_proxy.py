"""Two vLLM servers behind a proxy: one computes the prompts, and the other continues from their KV."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.pd_proxy import ask, pd_proxy
from tests.kit.vllm.plan import BLOCK_TOKENS
from tests.kit.vllm.served import make_model, served, tokens_from_peers

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts(12)


def test_requests_go_from_prefill_to_decode_through_a_proxy(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model)
    requests = [
        {"model": str(model), "prompt": each.tokens, "max_tokens": 8, "temperature": 0}
        for each in PROMPTS
    ]
    with ExitStack() as stack:
        prefill = stack.enter_context(
            served(model, tmp_path / "prefill.log", role="kv_producer", peers={})
        )
        decode = stack.enter_context(
            served(model, tmp_path / "decode.log", role="kv_consumer", peers={})
        )
        proxy = stack.enter_context(pd_proxy(prefill, decode))

        texts = [ask(proxy, each)["choices"][0]["text"] for each in requests]
        alone = [ask(prefill, each)["choices"][0]["text"] for each in requests]
        had = tokens_from_peers(decode)

    assert texts == alone
    assert had > sum(len(each.tokens) // BLOCK_TOKENS for each in PROMPTS) * BLOCK_TOKENS / 3
