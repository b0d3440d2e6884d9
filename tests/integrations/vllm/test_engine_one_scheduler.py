"""vLLM with one scheduler for all workers, as in `vllm serve`, returns vLLM's own outputs."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.faults import flip_a_byte, objects
from tests.kit.vllm.group import (
    QUICK,
    Group,
    assert_exact,
    differences,
    lockstep_connector,
)
from tests.kit.vllm.mixed_prompts import Prompt, mixed_prompts
from tests.kit.vllm.plan import Output, Phase, Plan, RankResult

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()
CROWDED = {"num_gpu_blocks_override": 40, "max_num_seqs": 80}
"""Engine settings with so few blocks that requests are preempted."""
ROUNDING = 1e-5
"""Tolerance for log-probabilities, which vary slightly with the step at which a request is preempted.
"""
CHUNKED = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}


def stored_bytes(folder: Path) -> list[int]:
    return [
        sum(each.stat().st_size for each in (folder / f"rank{rank}").rglob("*") if each.is_file())
        for rank in range(2)
    ]


def run(
    group: Group,
    phases: list[Phase],
    store: str,
    *,
    fault: str | None = None,
    engine: dict[str, Any] | None = None,
    ranks: int = 2,
    **extra: Any,
) -> RankResult:
    plan = Plan(
        model=group.model,
        phases=phases,
        connector=lockstep_connector(store, **QUICK, **extra),
        fault=fault,
        engine=engine or {},
        one_scheduler=True,
    )
    [result] = group.run(plan, ranks=ranks)
    assert result.stats["ended_by"] == ""
    assert result.stats["collectives"] == result.stats["rounds"]
    return result


@pytest.fixture(scope="module")
def filled_once(
    tmp_path_factory: pytest.TempPathFactory, model: Path, reference: list[Output]
) -> tuple[Path, RankResult]:
    """A store per rank with every page of the prompts, and the result of the run that wrote them."""
    folder = tmp_path_factory.mktemp("filled")
    phases = [
        Phase(PROMPTS, "cold"),
        Phase(PROMPTS, "warm"),
        Phase([Prompt(each.tokens, "tenant") for each in PROMPTS], "of another tenant"),
        Phase(PROMPTS, "reset", reset_connector=True),
        Phase(PROMPTS, "warm again"),
    ]
    result = run(Group(folder, model), phases, f"file://{folder}/rank{{rank}}")
    assert_exact(reference, [result])
    return folder, result


@pytest.fixture
def filled(filled_once: tuple[Path, RankResult], tmp_path: Path) -> str:
    """The URI of copies of the filled stores; each test has its own and may damage them."""
    for rank in range(2):
        shutil.copytree(filled_once[0] / f"rank{rank}", tmp_path / f"rank{rank}")
    return f"file://{tmp_path}/rank{{rank}}"


def test_it_is_exact_cold_and_warm_with_tenants_and_after_a_reset(
    filled_once: tuple[Path, RankResult],
) -> None:
    cold, warm, other, reset, again = filled_once[1].phases

    assert warm.cached_tokens > cold.cached_tokens
    assert other.cached_tokens == cold.cached_tokens
    assert reset.cached_tokens == cold.cached_tokens
    assert again.cached_tokens == warm.cached_tokens
    # The scheduler counts the hits that vLLM reports, and receives the workers' byte counts.
    stats, replica = filled_once[1].stats, filled_once[1].stats["replica"]
    cached = sum(each.cached_tokens for each in filled_once[1].phases)
    assert sum(replica["hit_tokens"].values()) == cached
    assert sum(replica["missed_tokens"].values()) == replica["asked_tokens"] - cached
    written = [stats["workers"][rank]["bytes_moved"]["l2_to_l3"] for rank in ("0", "1")]
    assert [
        0 < each <= size for each, size in zip(written, stored_bytes(filled_once[0]), strict=True)
    ]
    assert stats["bytes_moved"]["l2_to_l3"] == sum(written)


def test_after_a_restart_pages_come_from_storage_also_in_chunks(
    group: Group, reference: list[Output], filled: str, filled_once: tuple[Path, RankResult]
) -> None:
    result = run(group, [Phase(PROMPTS, "warm from storage")], filled, engine=CHUNKED)

    assert_exact(reference, [result])
    assert result.phases[0].cached_tokens == filled_once[1].phase("warm").cached_tokens


def test_with_preemption_and_eviction_from_a_small_host_memory(
    group: Group, reference: list[Output], filled: str
) -> None:
    """A preempted request's output may differ by rounding: its tokens are recomputed as a prompt."""
    phases = [Phase(PROMPTS, "first"), Phase(PROMPTS, "second")]

    result = run(group, phases, filled, engine=CROWDED, host_pages=100)

    assert_exact(reference, [result], rounding=ROUNDING)
    assert sum(phase.preemptions for phase in result.phases) > 0


@pytest.mark.parametrize("fault", ["down", "half a load"])
def test_what_goes_wrong_in_one_worker_changes_nothing_that_the_engine_says(
    group: Group, reference: list[Output], filled: str, fault: str
) -> None:
    result = run(group, [Phase(PROMPTS, "all")], filled, fault=fault)

    assert_exact(reference, [result])


def test_a_store_that_lost_every_second_page_of_one_rank_and_has_others_flipped(
    group: Group, reference: list[Output], filled: str, tmp_path: Path
) -> None:
    """One store lost pages, and the other has corrupt pages: pages whole in both are hits."""
    for path in objects(tmp_path, 1)[::2]:
        path.unlink()
    for path in objects(tmp_path, 0)[1::8]:
        flip_a_byte(path)

    result = run(group, [Phase(PROMPTS, "all")], filled)

    assert_exact(reference, [result])
    assert result.phases[0].cached_tokens > 0
    assert result.stats["pages_corrupt"] == result.stats["workers"]["0"]["pages_corrupt"] > 0
    assert result.stats["replica"]["missed_tokens"]["lost"] > 0


def test_a_page_that_is_trusted_though_it_was_flipped_shows(
    group: Group, reference: list[Output], filled: str, tmp_path: Path
) -> None:
    """Without checksums, a flipped page changes outputs: the comparison would notice a wrong page."""
    for path in objects(tmp_path, 1):
        flip_a_byte(path)

    result = run(group, [Phase(PROMPTS, "all")], filled, fault="trusting")

    assert differences(reference, result.phases[0].outputs)
