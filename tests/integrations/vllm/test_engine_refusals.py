"""What vLLM's user sees when something is wrong: one line that names it, and an exit status."""

import pytest

from tests.kit.vllm.group import Group, lockstep_connector
from tests.kit.vllm.mixed_prompts import Prompt
from tests.kit.vllm.plan import Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

SHORT = [Phase([Prompt(tuple(range(3, 103)))])]


def test_ranks_that_torchrun_starts_end_with_one_line_each_and_a_status(group: Group) -> None:
    connector = lockstep_connector(stroe="file:///kv")
    plan = Plan(model=group.model, phases=SHORT, connector=connector)

    finished = group.start_by_torchrun(plan)

    assert finished.returncode != 0
    check_lines(
        finished.stderr,
        "kv_connector_extra_config: there is no key 'stroe'; known: adapter_versions, bounds,",
    )


def check_lines(said: str, named: str) -> None:
    """Every line that refuses a configuration names what is wrong with it, and there are some."""
    told = [line for line in said.splitlines() if "ConfigError: " in line]
    assert told, said[-2000:]
    assert all(named in line for line in told)
