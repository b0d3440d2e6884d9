"""vLLM with Lockstep and a scheduler on every rank returns vLLM's own outputs.

Tokens and log-probabilities are equal exactly. On the CPU, a request's result does not depend on its
batch, on chunks, or on cached tokens, so one run without a connector is the reference for all.
"""

from pathlib import Path

import pytest

from tests.kit.vllm.faults import objects
from tests.kit.vllm.group import QUICK, Group, assert_exact, lockstep_connector
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Output, Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()


def test_cold_and_warm_and_after_a_restart_also_where_one_rank_s_store_has_lost_pages(
    group: Group, reference: list[Output], tmp_path: Path
) -> None:
    """Rule R9: outputs are exact cold, warm, and from storage, even if one store has lost pages."""
    connector = lockstep_connector(f"file://{tmp_path}/rank{{rank}}", **QUICK)
    phases = [Phase(PROMPTS, "cold"), Phase(PROMPTS, "warm from host memory")]
    again = Plan(
        model=group.model, phases=[Phase(PROMPTS, "warm from storage")], connector=connector
    )

    first = group.run(Plan(model=group.model, phases=phases, connector=connector))
    second = group.run(again)
    lost = objects(tmp_path, 1)[::2]
    for path in lost:
        path.unlink()
    third = group.run(again)

    for ranks in (first, second, third):
        assert_exact(reference, ranks)
    cold, warm = first[0].phases
    assert warm.cached_tokens > cold.cached_tokens
    assert second[0].phases[0].cached_tokens == warm.cached_tokens
    stats = [result.stats for result in (*first, *second, *third)]
    counts = [(each["rounds"], each["collectives"], each["pages_corrupt"]) for each in stats]
    assert counts == [(each["steps"], each["steps"], 0) for each in stats]
    assert second[0].stats["bytes_moved"]["l3_to_l2"] > 0
    fetched = [each.stats["replica"]["operations"]["prefetch"] for each in third]
    assert fetched[0] == fetched[1]
    assert fetched[0].get("partial", 0) + fetched[0]["miss"] > 0
    # Pages missing on one rank were computed again, and both ranks wrote them again.
    assert len(objects(tmp_path, 1)) == len(objects(tmp_path, 0)) > len(lost) > 150
