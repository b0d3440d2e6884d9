"""One store serves vLLM and SGLang: each continues from pages that the other wrote (rule R16)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Request
from tests.kit.vllm.group import Group, differences, lockstep_connector
from tests.kit.vllm.mixed_prompts import Prompt
from tests.kit.vllm.plan import BLOCK_TOKENS, Output, Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

TOKENS = tuple(range(3, 403))
PREFIX = 384
"""Number of prompt tokens in whole pages; a prompt's last token is always computed."""
PLAIN = Prompt(TOKENS)
LONGER = Prompt((*TOKENS[:PREFIX], *range(9, 41)))
TENANT, ANOTHER = Prompt(TOKENS, "a tenant"), Prompt(TOKENS, "another")
ROUNDING = 1e-4
"""Tolerance for log-probabilities, because the engines sum in different orders."""


def vllm(folder: Path, model: Path, store: str | None, *prompts: Prompt) -> list[Output]:
    """Let vLLM answer the prompts one by one, with an empty prefix cache."""
    folder.mkdir()
    phases = [Phase([each]) for each in prompts]
    connector = lockstep_connector(store) if store else None
    plan = Plan(model=str(model), phases=phases, connector=connector)
    [result] = Group(folder, model).run(plan, ranks=1)
    return [phase.outputs[0] for phase in result.phases]


def sglang(folder: Path, model: Path, store: str, *prompts: Prompt) -> list[Output]:
    """Let SGLang answer the prompts one by one, with pages as large as vLLM's blocks."""
    arguments: dict[str, Any] = {"page_size": BLOCK_TOKENS}
    with lockstep_engine(folder, model, tp=1, store=store, **arguments) as engine:
        outputs = [answered(engine, each) for each in prompts]
        assert engine.shutdown() == []
    return outputs


def answered(engine: RunningEngine, prompt: Prompt) -> Output:
    engine.flush()
    [found] = engine.generate([Request(tokens=prompt.tokens, salt=prompt.salt)])
    return Output(found.tokens, found.logprobs, found.cached_tokens)


def cached(outputs: Sequence[Output]) -> list[int]:
    return [each.cached_tokens for each in outputs]


@pytest.mark.parametrize(("writes", "reads"), [(vllm, sglang), (sglang, vllm)])
def test_what_one_engine_wrote_the_other_restores_and_goes_on_with_exactly(
    tmp_path: Path, model: Path, writes: Any, reads: Any
) -> None:
    store = f"file://{tmp_path}/store"
    writes(tmp_path / "writes", model, store, PLAIN, TENANT)

    found = reads(tmp_path / "reads", model, store, PLAIN, LONGER, TENANT, ANOTHER)

    alone = vllm(tmp_path / "alone", model, None, PLAIN, LONGER, TENANT, ANOTHER)
    assert cached(found) == [PREFIX, PREFIX, PREFIX, 0]
    assert differences(alone, found, rounding=ROUNDING) == []
