"""Models with windows or recurrent states return vLLM's own outputs under Lockstep.

Tokens and log-probabilities are compared. Each one-rank engine runs only once, before the first test.
This run covers as many states of the cache as possible, and the tests check its results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.faults import objects
from tests.kit.vllm.group import (
    QUICK,
    Group,
    assert_exact,
    differences,
    lockstep_connector,
)
from tests.kit.vllm.mixed_prompts import Prompt, mixed_prompts
from tests.kit.vllm.plan import Output, Phase, PhaseResult, Plan, RankResult
from tests.kit.vllm.tiny_models import MAKERS

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT = 40
NEARLY = 0.05


@dataclass(frozen=True)
class Model:
    name: str
    few_blocks: int
    """Number of device blocks. They suffice for the longest prompt, but not for all prompts of the
    phase `crowd`."""
    block_tokens: int = 32
    longer: int = 1
    """Number of times that a prompt's text is repeated, so that prompts fill whole blocks."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(each.tokens * self.longer) for each in mixed_prompts(COUNT)]

    @property
    def crowd(self) -> list[Prompt]:
        """Prompts four tokens shorter than a block, so that each soon needs a second block."""
        texts = [tuple(range(3 + at, 451)) * 2 for at in range(24)]
        return [Prompt(each[: self.block_tokens - 4]) for each in texts]


MODELS = [
    Model("gpt-oss", 40),
    Model(
        "qwen-next",
        16,
        block_tokens=544,
        longer=3,
        engine={
            "dtype": "bfloat16",
            "max_model_len": 2048,
            # A chunk is one block long, because a state's last bits depend on where chunks begin. Every
            # chunk thus begins at a block boundary, wherever the prefix comes from.
            "long_prefill_token_threshold": 544,
        },
    ),
]
EACH = pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)


def plans(model: Model, folder: Path) -> dict[str, Plan]:
    """Return the one-rank engine runs for a model by name, in the order in which they run."""
    prompts, engine = model.prompts, dict(model.engine)
    roomy = lockstep_connector(f"file://{folder}/store", **QUICK)
    tight = lockstep_connector(f"file://{folder}/other", **QUICK | {"host_pages": 40})
    crowded = engine | {
        "max_num_batched_tokens": 2 * model.block_tokens,
        "enable_chunked_prefill": True,
        "num_gpu_blocks_override": model.few_blocks,
        "max_num_seqs": 64,
    }
    salted = [Prompt(each.tokens, "tenant") for each in prompts]

    def plan(*phases: Phase, **settings: Any) -> Plan:
        usual = Plan(
            model=str(folder / "model"), phases=list(phases), engine=engine, connector=roomy
        )
        return replace(usual, **settings)

    return {
        "alone": plan(Phase(prompts), Phase(model.crowd, "crowd"), connector=None),
        "roomy": plan(
            Phase(prompts, "cold"),
            Phase(prompts, "warm"),
            Phase(salted, "of a tenant"),
            Phase(prompts, "half of them aborted", aborts=True),
            Phase(prompts, "warm after aborts"),
        ),
        "restarted": plan(Phase(prompts, "from storage")),
        "tight": plan(
            Phase(prompts, "cold"),
            Phase(prompts, "evicted"),
            Phase(model.crowd, "crowd"),
            engine=crowded,
            connector=tight,
        ),
        "poisoned": plan(Phase(prompts, "from storage"), fault="poisoned"),
    }


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, RankResult]]:
    found: dict[str, dict[str, RankResult]] = {}
    for model in MODELS:
        folder = tmp_path_factory.mktemp(model.name)
        MAKERS[model.name](folder / "model")
        group = Group(folder, folder / "model")
        found[model.name] = {
            name: group.run(plan, ranks=1)[0] for name, plan in plans(model, folder).items()
        }
    return found


@pytest.fixture
def runs(all_runs: dict[str, dict[str, RankResult]], model: Model) -> dict[str, RankResult]:
    return all_runs[model.name]


def alone(runs: Mapping[str, RankResult]) -> list[Output]:
    return runs["alone"].phase("cold").outputs


def differences_in(expected: list[Output], result: RankResult, name: str) -> list[str]:
    return differences(expected, result.phase(name).outputs)


def share(model: Model, result: RankResult, name: str) -> float:
    return result.phase(name).cached_tokens / sum(len(each.tokens) for each in model.prompts)


@EACH
def test_it_is_exact_cold_and_warm_and_after_aborts_and_tenants_share_nothing(
    model: Model, runs: dict[str, RankResult]
) -> None:
    reference, roomy = alone(runs), runs["roomy"]

    assert differences_in(reference, roomy, "cold") == []
    assert differences_in(reference, roomy, "warm") == []
    assert differences_in(reference, roomy, "of a tenant") == []
    assert differences_in(reference[::2], roomy, "half of them aborted") == []
    assert differences_in(reference, roomy, "warm after aborts") == []
    cold, warm = share(model, roomy, "cold"), share(model, roomy, "warm")
    assert warm > max(0.4, 2 * cold)
    # Allow a difference: concurrent requests' hits in vLLM's prefix cache depend on their order.
    assert share(model, roomy, "of a tenant") < cold + NEARLY
    assert share(model, roomy, "warm after aborts") > warm - NEARLY


@EACH
def test_after_a_restart_pages_of_every_group_come_from_storage(
    model: Model, runs: dict[str, RankResult]
) -> None:
    restarted = runs["restarted"]

    assert differences_in(alone(runs), restarted, "from storage") == []
    assert share(model, restarted, "from storage") > 0.4


@EACH
def test_it_is_exact_in_chunks_with_evictions_and_preemptions(
    model: Model, runs: dict[str, RankResult]
) -> None:
    tight, without = runs["tight"], runs["alone"]

    references = {"cold": "cold", "evicted": "cold", "crowd": "crowd"}
    differing = {
        name: differences_in(without.phase(reference).outputs, tight, name)
        for name, reference in references.items()
    }
    assert {
        name: requests
        for name, requests in differing.items()
        if len(requests) > may_differ(model, tight.phase(name))
    } == {}
    assert tight.stats["bytes_moved"]["l3_to_l2"] > 0
    assert tight.phase("crowd").preemptions > 0


def may_differ(model: Model, phase: PhaseResult) -> int:
    """Return the number of requests whose output may differ in its last bits.

    A preempted request recomputes its output tokens as part of its prompt. This changes a state's bits,
    even without a connector.
    """
    return phase.preemptions if "long_prefill_token_threshold" in model.engine else 0


@EACH
def test_poison_beside_full_attention_shows_where_it_is_trusted(
    model: Model, runs: dict[str, RankResult]
) -> None:
    poisoned = runs["poisoned"]

    assert len(differences_in(alone(runs), poisoned, "from storage")) > COUNT // 4
    assert poisoned.stats["pages_corrupt"] == 0


@EACH
def test_two_ranks_whose_stores_disagree_are_exact(tmp_path: Path, model: Model) -> None:
    """Two ranks whose stores disagree return the outputs of an engine without a cache."""
    MAKERS[model.name](tmp_path / "model")
    group, prompts, engine = Group(tmp_path, tmp_path / "model"), model.prompts, dict(model.engine)
    connector = lockstep_connector(f"file://{tmp_path}/rank{{rank}}", **QUICK)

    def run(*phases: Phase) -> list[RankResult]:
        return group.run(
            Plan(
                model=group.model,
                phases=list(phases),
                engine=engine,
                connector=connector,
                one_scheduler=True,
            )
        )

    [without, _] = group.run(Plan(model=group.model, phases=[Phase(prompts)], engine=engine))
    filled = run(Phase(prompts, "cold"), Phase(prompts, "warm"))
    for path in objects(tmp_path, 1)[::3]:
        path.unlink()
    disagreeing = run(Phase(prompts, "from storage"))

    reference = without.phase("cold").outputs
    assert_exact(reference, filled)
    assert_exact(reference, disagreeing)
    assert share(model, filled[0], "warm") > 0.4
    assert 0 < share(model, disagreeing[0], "from storage") < share(model, filled[0], "warm")
