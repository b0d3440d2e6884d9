"""An engine that sleeps under load has the outputs of one that never sleeps, and hits no stale page."""

from pathlib import Path

import pytest

from tests.kit.vllm.group import Group, assert_exact, lockstep_connector
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts(80)
SLEEPS = 20
ROUNDING = 1e-5
"""Tolerance for log-probabilities: after a sleep, output tokens are recomputed as prompt tokens."""
OUTPUT_TOKENS = 24


def test_twenty_sleeps_under_load_leave_tokens_exact_and_no_stale_page(
    group: Group, tmp_path: Path
) -> None:
    """Outputs are exact while the engine sleeps twenty times under load, and in a warm run later."""
    phases = [
        Phase(PROMPTS, "asleep at times", OUTPUT_TOKENS, sleeps=SLEEPS),
        Phase(PROMPTS, "warm", OUTPUT_TOKENS),
    ]
    cold = Phase(PROMPTS, "cold", OUTPUT_TOKENS)
    [awake] = group.run(Plan(model=group.model, phases=[cold], one_scheduler=True))

    [result] = group.run(
        Plan(
            model=group.model,
            phases=phases,
            connector=lockstep_connector(f"file://{tmp_path}/kv", weights_change="with_name"),
            engine={"worker_cls": "tests.kit.vllm.sleeping.SleepingWorker"},
            one_scheduler=True,
        )
    )

    assert_exact(awake.phases[0].outputs, [result], rounding=ROUNDING)
    assert result.phase("asleep at times").preemptions > 0
    assert result.phase("warm").cached_tokens > awake.phases[0].cached_tokens
    assert result.stats["ended_by"] == ""
