"""vLLM's weights change in place, and what it says is what engines say that began with them."""

from pathlib import Path

import pytest
import tiny_llama

from tests.kit.vllm.group import Group, differences, lockstep_connector
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()[:40]


def test_weights_that_change_in_place_find_their_own_pages_alone_and_find_them_when_they_come_back(
    tmp_path: Path,
) -> None:
    """Named with a reset after it, named without one, reset by a sleep, and named again."""
    folders = [tmp_path / name for name in ("former", "latter")]
    for seed, folder in enumerate(folders):
        tiny_llama.make(folder, seed=seed)
    former, latter = map(str, folders)
    group = Group(tmp_path, folders[0])
    phases = [
        Phase(PROMPTS, "former"),
        Phase(PROMPTS, "former, warm"),
        Phase(PROMPTS, "latter", weights=latter, weights_version="step-1", reset_connector=True),
        Phase(PROMPTS, "latter, warm"),
        Phase(PROMPTS, "former, back", weights=former, weights_version="default"),
        Phase(PROMPTS, "former, reset", reset_connector=True),
        Phase(PROMPTS, "former, named", weights_version="default"),
    ]

    references = [
        group.run(Plan(model=model, phases=[Phase(PROMPTS)]), ranks=1)[0].phases[0].outputs
        for model in (former, latter)
    ]
    connector = lockstep_connector(f"file://{tmp_path}/store")
    [ran] = group.run(Plan(model=former, phases=phases, connector=connector), ranks=1)

    found = [
        differences(references[phase.name.startswith("latter")], phase.outputs)
        for phase in ran.phases
    ]
    assert found == [[]] * len(phases)
    assert references[0] != references[1]
    cold, warm, other, other_warm, back, reset, named = (each.cached_tokens for each in ran.phases)
    assert warm > cold
    assert (other, other_warm) == (cold, warm)
    assert (back, reset, named) == (warm, cold, warm)
    assert ran.stats["bytes_moved"]["l3_to_l2"] == 0
