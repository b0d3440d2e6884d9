"""In whatever order SGLang visits the requests that wait, each is loaded once and is exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.counting import by_tier
from tests.kit.sglang.engine import PLUGINS, RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine, lockstep_flags
from tests.kit.sglang.requests import Answer, Request, differences
from tests.kit.sglang.stock import PROBE, TOLERANCE, adapters_engine
from tests.kit.sglang.tiny_models import make_llama_adapter

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPTS = 24
PAGE_TOKENS = 16
REQUESTS = [
    Request(
        tokens=range(first, first + 13 * PAGE_TOKENS + first % 3),
        output_tokens=30,
        priority=first % 4,
    )
    for first in range(3, 3 + 5 * PROMPTS, 5)
]
"""Some of whole pages, all of which SGLang matches to put them in order."""
CROWDED = {"max_total_tokens": 1024, "max_running_requests": 8}
"""Four of them fill the device."""

POLICIES: dict[str, dict[str, Any]] = {
    "longest prefix, two ranks": {"schedule_policy": "lpm", "tp": 2},
    "longest prefix, retracted": {"schedule_policy": "lpm", "faults": {"retract_every": 7}},
    "at random, two ranks": {"schedule_policy": "random", "tp": 2},
    # As batches of several are computed beside loads, too much may be promised.
    "waited for longest": {"schedule_policy": "hrrn", "hicache_storage_backend": None},
    "depth first": {"schedule_policy": "dfs-weight", "hicache_storage_backend": None},
    "by priority": {"enable_priority_scheduling": True},
}
RARE = ("at random, two ranks", "waited for longest", "depth first")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Answer]:
    """What stock SGLang says to each, alone."""
    with RunningEngine(tmp_path_factory.mktemp("stock"), model, tp=1, plugins=(PROBE,)) as engine:
        return engine.generate(REQUESTS, together=False)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in RARE)) for each in POLICIES],
)
def test_each_prompt_comes_from_the_host_by_one_load(
    name: str, tmp_path: Path, model: Path, stock: list[Answer]
) -> None:
    options: dict[str, Any] = {"tp": 1, **CROWDED, **POLICIES[name]}

    with lockstep_engine(tmp_path, model, **options) as engine:
        cold = engine.generate(REQUESTS)
        before = engine.ranks()[0].state["loads"]
        warm = engine.generate(REQUESTS)
        loads = engine.ranks()[0].state["loads"] - before

    assert differences(stock, cold, tolerance=TOLERANCE) == []
    assert differences(stock, warm, tolerance=TOLERANCE) == []
    assert by_tier(warm, "host") > by_tier(warm, "device")
    retractions = sum(answer.retractions for answer in warm)
    assert PROMPTS / 2 < loads <= 1.5 * (PROMPTS + retractions)


def test_several_that_are_preempted_at_once_go_on_in_the_same_order_on_every_rank(
    tmp_path: Path, model: Path, stock: list[Answer]
) -> None:
    options: dict[str, Any] = {
        "max_total_tokens": 1024,
        "max_running_requests": 6,
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": 1,
    }
    low = [
        Request(tokens=range(first, first + 48), output_tokens=100, priority=0, logprobs=False)
        for first in range(300, 306)
    ]
    high = replace(REQUESTS[0], priority=9, output_tokens=300, logprobs=False)

    with lockstep_engine(tmp_path, model, **options) as engine:
        alone = engine.generate([*low, high], together=False)
        running = engine.send(low)
        for at in range(len(low)):
            running.wait_for(request=at, tokens=8)
        [urgent] = engine.generate([high])
        preempted = running.answers()

    assert [each.tokens for each in [*preempted, urgent]] == [each.tokens for each in alone]
    assert urgent.tokens[:30] == stock[0].tokens
    assert sum(answer.retractions for answer in preempted) > 1


@pytest.mark.slow
def test_requests_of_more_adapters_than_a_batch_takes_are_not_loaded_again_and_again(
    tmp_path: Path, model: Path
) -> None:
    options: dict[str, Any] = {
        **lockstep_flags(),
        "plugins": PLUGINS,
        "max_total_tokens": 1024,
        "max_running_requests": 3,
        "max_loras_per_batch": 1,
    }
    requests = [
        replace(each, adapter=("one", "other")[at % 2], output_tokens=60, logprobs=False)
        for at, each in enumerate(REQUESTS[:16])
    ]

    with adapters_engine(tmp_path, model, **options) as engine:
        for seed, name in enumerate(("one", "other")):
            make_llama_adapter(tmp_path / name, seed=seed)
            engine.ask("load_adapter", name=name, path=str(tmp_path / name))
        alone = engine.generate(requests, together=False)
        before = engine.ranks()[0].state["loads"]
        together = engine.generate(requests)
        loads = engine.ranks()[0].state["loads"] - before

    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert loads <= 2 * len(requests)
