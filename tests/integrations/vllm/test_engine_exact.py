"""vLLM with Lockstep says what vLLM says without it: the same tokens, the same log-probabilities.

Exactly the same. On the CPU the result of a request depends neither on what it was batched with, nor
on chunks, nor on which of its tokens came from a cache, so one run without a connector serves for all.
"""

from pathlib import Path

import pytest
import tiny_llama

from tests.kit.vllm.group import Group, assert_exact, lockstep_connector
from tests.kit.vllm.mixed_prompts import Prompt, mixed_prompts
from tests.kit.vllm.plan import BLOCK_TOKENS, Output, Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()
BLOCKS = 40
CROWDED = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 2 * BLOCKS}
"""An engine that admits requests until no block is left."""
BOTH_DEPTHS = pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])


@BOTH_DEPTHS
def test_cold_and_warm_from_host_memory_and_after_a_restart_from_storage(
    group: Group, reference: list[Output], tmp_path: Path, depth: int
) -> None:
    connector = lockstep_connector(f"file://{tmp_path}/store", pipeline_depth=depth)
    phases = [Phase(PROMPTS, "cold"), Phase(PROMPTS, "warm from host memory")]

    first = group.run(Plan(model=group.model, phases=phases, connector=connector))
    again = Phase(PROMPTS, "warm from storage")
    second = group.run(Plan(model=group.model, phases=[again], connector=connector))

    assert_exact(reference, first)
    assert_exact(reference, second)
    cold, warm = first[0].phases
    assert warm.cached_tokens > cold.cached_tokens
    assert second[0].phases[0].cached_tokens == warm.cached_tokens
    stats = [result.stats for result in (*first, *second)]
    counts = [(each["rounds"], each["collectives"], each["pages_corrupt"]) for each in stats]
    assert counts == [(each["steps"], each["steps"], 0) for each in stats]
    assert second[0].stats["bytes_moved"]["l3_to_l2"] > 0


@pytest.mark.slow
def test_after_eviction_from_host_memory_pages_come_from_storage(
    group: Group, reference: list[Output], tmp_path: Path
) -> None:
    """Also after a restart, but for blocks that the engine reused before host memory had room."""
    store = f"file://{tmp_path}/store"
    phases = [Phase(PROMPTS, name) for name in ("cold", "second", "third")]

    tight = lockstep_connector(store, host_pages=16)
    ranks = group.run(Plan(model=group.model, phases=phases, connector=tight))
    again = Phase(PROMPTS, "warm from storage")
    roomy = Plan(model=group.model, phases=[again], connector=lockstep_connector(store))
    later = group.run(roomy)

    assert_exact(reference, ranks)
    assert_exact(reference, later)
    assert ranks[0].stats["bytes_moved"]["l3_to_l2"] > 0
    assert ranks[0].phases[1].cached_tokens > ranks[0].phases[0].cached_tokens
    whole = sum((len(each.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for each in PROMPTS)
    lacking = whole - later[0].phases[0].cached_tokens
    assert lacking <= BLOCK_TOKENS * ranks[0].stats["left_unwritten_pages"].get("no_host_room", 0)
    assert lacking < whole / 20


@pytest.mark.slow
def test_with_chunked_prefill(group: Group, reference: list[Output], tmp_path: Path) -> None:
    connector = lockstep_connector(f"file://{tmp_path}/store")
    engine = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    phases = [Phase(PROMPTS, "cold"), Phase(PROMPTS, "warm")]

    ranks = group.run(Plan(model=group.model, phases=phases, connector=connector, engine=engine))

    assert_exact(reference, ranks)
    assert ranks[0].phase("warm").cached_tokens > ranks[0].phase("cold").cached_tokens


@pytest.mark.slow
def test_with_blocks_for_two_of_the_longest_prompts(
    group: Group, reference: list[Output], tmp_path: Path
) -> None:
    """How many requests are preempted depends on when their lookups come back."""
    connector = lockstep_connector(f"file://{tmp_path}/store")
    phases = [Phase(PROMPTS, "cold"), Phase(PROMPTS, "warm")]

    ranks = group.run(Plan(model=group.model, phases=phases, connector=connector, engine=CROWDED))

    assert_exact(reference, ranks)
    assert ranks[0].phase("warm").cached_tokens > ranks[0].phase("cold").cached_tokens


@pytest.mark.slow
def test_with_preemption(group: Group, tmp_path: Path) -> None:
    """Prompts of one block have nothing to look up, and fill the engine at once.

    So many are admitted as there are blocks, and then each needs a second one for its output.
    """
    starts = range(3, 3 + 2 * BLOCKS)
    crowd = [Prompt(tuple(range(start, start + BLOCK_TOKENS))) for start in starts]
    connector = lockstep_connector(f"file://{tmp_path}/store")
    phases = [Phase(crowd, "crowd"), Phase(crowd, "crowd again")]

    alone = group.run(Plan(model=group.model, phases=[Phase(crowd)]))
    ranks = group.run(Plan(model=group.model, phases=phases, connector=connector, engine=CROWDED))

    assert_exact(alone[0].phase("cold").outputs, ranks)
    assert all(phase.preemptions > 0 for result in ranks for phase in result.phases)


@pytest.mark.slow
def test_two_salts_share_nothing_and_are_exact(
    group: Group, reference: list[Output], tmp_path: Path
) -> None:
    """What a tenant has cached is no hit for another one that sends the same text."""
    connector = lockstep_connector(f"file://{tmp_path}/store")
    salted = mixed_prompts(salts=2)
    one = [Prompt(prompt.tokens, "tenant 0") for prompt in PROMPTS]
    other = [Prompt(prompt.tokens, "tenant 1") for prompt in PROMPTS]
    phases = [
        Phase(one, "one tenant, cold"),
        Phase(other, "the other, cold"),
        Phase(one, "one, warm"),
        Phase(salted, "both in turn, warm"),
    ]

    ranks = group.run(Plan(model=group.model, phases=phases, connector=connector))

    assert_exact(reference, ranks)
    first, second, warm, both = ranks[0].phases
    assert second.cached_tokens == first.cached_tokens
    assert warm.cached_tokens > first.cached_tokens
    assert both.cached_tokens == warm.cached_tokens


@pytest.mark.slow
def test_after_a_reset_of_the_connector_nothing_cached_before_is_used(
    group: Group, reference: list[Output], tmp_path: Path
) -> None:
    connector = lockstep_connector(f"file://{tmp_path}/store")
    phases = [
        Phase(PROMPTS, "cold"),
        Phase(PROMPTS, "warm"),
        Phase(PROMPTS, "reset", reset_connector=True),
        Phase(PROMPTS, "warm again"),
    ]

    ranks = group.run(Plan(model=group.model, phases=phases, connector=connector))

    assert_exact(reference, ranks)
    cold, warm, reset, again = ranks[0].phases
    assert reset.cached_tokens == cold.cached_tokens
    assert again.cached_tokens == warm.cached_tokens > cold.cached_tokens


@pytest.mark.slow
def test_weights_that_were_trained_again_in_place_find_nothing_of_the_former_ones(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    tiny_llama.make(folder)
    group = Group(tmp_path, folder)
    connector = lockstep_connector(f"file://{tmp_path}/store")
    phases = [Phase(PROMPTS[:20], "cold")]
    [former] = group.run(Plan(model=group.model, phases=phases, connector=connector), ranks=1)

    tiny_llama.make(folder, seed=1)
    [alone] = group.run(Plan(model=group.model, phases=phases), ranks=1)
    [latter] = group.run(Plan(model=group.model, phases=phases, connector=connector), ranks=1)

    assert_exact(alone.phases[0].outputs, [latter])
    assert latter.phases[0].cached_tokens == former.phases[0].cached_tokens
    assert latter.stats["bytes_moved"]["l3_to_l2"] == 0
