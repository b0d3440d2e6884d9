"""Weights change in place in vLLM: outputs equal those of engines started with these weights."""

from pathlib import Path

import pytest
import tiny_llama

from tests.kit.vllm.group import Group, differences, lockstep_connector
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Output, Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()[:40]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = [tmp_path_factory.mktemp("models") / name for name in ("former", "latter")]
    for seed, folder in enumerate(folders):
        tiny_llama.make(folder, seed=seed)
    return list(map(str, folders))


@pytest.fixture(scope="module")
def references(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[list[Output]]:
    group = Group(tmp_path_factory.mktemp("references"), Path(models[0]))
    plans = [Plan(model=model, phases=[Phase(PROMPTS)]) for model in models]
    found = [group.run(plan, ranks=1)[0].phases[0].outputs for plan in plans]
    assert found[0] != found[1]
    return found


def test_weights_that_change_in_place_find_their_own_pages_alone_and_find_them_when_they_come_back(
    models: list[str], references: list[list[Output]], tmp_path: Path
) -> None:
    """Weights change in place and back, with or without a reset. Each version hits only its pages."""
    former, latter = models
    phases = [
        Phase(PROMPTS, "former"),
        Phase(PROMPTS, "former, warm"),
        Phase(PROMPTS, "latter", weights=latter, weights_version="step-1", reset_connector=True),
        Phase(PROMPTS, "latter, warm"),
        Phase(PROMPTS, "former, back", weights=former, weights_version="default"),
        Phase(PROMPTS, "former, reset", reset_connector=True),
        Phase(PROMPTS, "former, named", weights_version="default"),
    ]
    plan = Plan(
        model=former,
        phases=phases,
        connector=lockstep_connector(f"file://{tmp_path}/store"),
        one_scheduler=True,
    )

    [ran] = Group(tmp_path, Path(former)).run(plan, ranks=1)

    found = [
        differences(references[phase.name.startswith("latter")], phase.outputs)
        for phase in ran.phases
    ]
    assert found == [[]] * len(phases)
    cold, warm, other, other_warm, back, reset, named = (each.cached_tokens for each in ran.phases)
    assert warm > cold
    assert (other, other_warm) == (cold, warm)
    assert (back, reset, named) == (warm, cold, warm)
    assert ran.stats["bytes_moved"]["l3_to_l2"] == 0
