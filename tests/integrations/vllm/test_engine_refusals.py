"""What vLLM's user sees when something is wrong: one line that names it, and an exit status."""

from typing import Any

import pytest

from tests.kit.vllm.group import Group, lockstep_connector
from tests.kit.vllm.mixed_prompts import Prompt
from tests.kit.vllm.plan import Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

SHORT = [Phase([Prompt(tuple(range(3, 103)))])]


@pytest.mark.parametrize(
    ("connector", "named"),
    [
        (
            lockstep_connector() | {"kv_load_failure_policy": "fail"},
            "kv_load_failure_policy is 'fail' in kv_transfer_config",
        ),
        (lockstep_connector("ftp://kv"), "unknown scheme 'ftp'; known: 3fs, file, memory"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(
    group: Group, connector: dict[str, Any], named: str
) -> None:
    plan = Plan(model=group.model, phases=SHORT, connector=connector)

    ended, folder = group.start(plan)

    assert ended.failed
    check_lines(ended.said, named)
    assert not list(folder.glob("rank*.json"))


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


def test_one_rank_alone_needs_no_group_to_be_started(group: Group) -> None:
    phases = [Phase(SHORT[0].prompts, "cold"), Phase(SHORT[0].prompts, "warm")]
    plan = Plan(model=group.model, phases=phases, connector=lockstep_connector())

    [result] = group.run(plan, ranks=1)

    cold, warm = result.phases
    assert warm.outputs[0].tokens == cold.outputs[0].tokens
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
