"""In vLLM, a request with an adapter hits only pages computed with the same adapter weights."""

import shutil
from pathlib import Path

import pytest

from tests.kit.sglang.tiny_models import make_llama_adapter
from tests.kit.vllm.group import Group, differences, lockstep_connector
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Phase, Plan, RankResult

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts(40)
ENGINE = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def test_adapters_share_nothing_are_exact_and_are_found_in_storage_by_their_weights(
    group: Group, tmp_path: Path
) -> None:
    one, other, moved = (tmp_path / name for name in ("one", "other", "moved"))
    make_llama_adapter(one, seed=1)
    make_llama_adapter(other, seed=2)
    shutil.copytree(one, moved)

    def run(*phases: Phase, cached: bool = True) -> RankResult:
        connector = lockstep_connector(f"file://{tmp_path}/store") if cached else None
        plan = Plan(
            model=group.model,
            phases=list(phases),
            engine=ENGINE,
            connector=connector,
            one_scheduler=True,
        )
        [result] = group.run(plan)
        return result

    with_none, with_one = Phase(PROMPTS, "none"), Phase(PROMPTS, "one", adapter=str(one))
    with_other = Phase(PROMPTS, "other", adapter=str(other))
    alone = run(with_none, with_one, with_other, cached=False)
    warm = Phase(PROMPTS, "one, warm", adapter=str(one))
    first = run(with_none, with_one, with_other, warm)
    again = run(Phase(PROMPTS, "one, moved", adapter=str(moved)))

    none, of_one, of_other = (phase.outputs for phase in alone.phases)
    assert len(differences(none, of_one)) == len(differences(of_one, of_other)) == len(PROMPTS)
    expected = [none, of_one, of_other, of_one]
    found = [phase.outputs for phase in first.phases]
    assert list(map(differences, expected, found)) == [[]] * 4
    assert differences(of_one, again.phases[0].outputs) == []
    cold = first.phase("none").cached_tokens
    assert first.phase("one").cached_tokens == first.phase("other").cached_tokens == cold
    assert first.phase("one, warm").cached_tokens == again.phases[0].cached_tokens > cold
