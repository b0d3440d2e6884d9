"""Fixtures of the vLLM tests: a tiny model, and its outputs without a connector."""

from pathlib import Path

import pytest

from tests.kit.vllm.group import Group
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Output, Phase, Plan


@pytest.fixture
def group(tmp_path: Path, model: Path) -> Group:
    return Group(tmp_path, model)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Output]:
    """Outputs of 200 mixed requests on two ranks without a connector."""
    group = Group(tmp_path_factory.mktemp("reference"), model)
    plan = Plan(model=group.model, phases=[Phase(mixed_prompts())])
    first, second = group.run(plan)
    assert first.phases[0].outputs == second.phases[0].outputs
    return first.phases[0].outputs
