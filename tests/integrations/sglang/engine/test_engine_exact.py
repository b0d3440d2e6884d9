"""SGLang with Lockstep returns stock SGLang's tokens and log-probabilities.

The comparison has a tolerance, because Lockstep caches more than stock SGLang. Prompts are then
computed in different chunks, which changes the last digits of sums.
"""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import (
    by_tier,
    differences,
    rounds_beyond_iterations,
)
from tests.kit.sglang.stock import TOLERANCE, Stock, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = mixed_requests()


@dataclass(frozen=True, slots=True)
class Served:
    """An engine with Lockstep, and the answers of stock SGLang on the same number of ranks."""

    engine: RunningEngine
    stock: Stock
    store: Path


@pytest.fixture(scope="module", params=[1, 2])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Generator[Served]:
    """An engine with a file store; the tests run once with one rank and once with two ranks."""
    tp: int = request.param
    folder = tmp_path_factory.mktemp(f"lockstep{tp}")
    store = folder / "store"
    stock: Stock = request.getfixturevalue(f"stock_tp{tp}")
    with lockstep_engine(folder, model, tp=tp, store=f"file://{store}") as engine:
        yield Served(engine, stock, store)


def test_cold_and_warm_from_host_memory(served: Served) -> None:
    cold = served.engine.generate(REQUESTS, together=False)
    warm = served.engine.generate(REQUESTS, together=False)
    counted = served.engine.ranks()
    together = served.engine.generate(REQUESTS)

    assert differences(served.stock.cold, cold, tolerance=TOLERANCE) == []
    assert differences(served.stock.warm, warm, tolerance=TOLERANCE) == []
    assert differences(served.stock.together, together, tolerance=TOLERANCE) == []
    assert by_tier(warm, "host") > 0
    # Lockstep's counts equal the cached tokens by tier that SGLang reports to its users.
    tiers = {tier: by_tier([*cold, *warm], tier) for tier in ("device", "host", "storage")}
    assert [each.state["hit_tokens"] for each in counted] == [tiers] * len(counted)
    missed = [sum(each.state["missed_tokens"].values()) for each in counted]
    expected = [each.state["asked_tokens"] - sum(tiers.values()) for each in counted]
    assert missed == expected


def test_each_iteration_has_one_round_and_no_other_collective_of_the_tiers(served: Served) -> None:
    before = served.engine.ranks()
    served.engine.generate(REQUESTS)
    after = served.engine.ranks()

    assert rounds_beyond_iterations(before, after) == [0] * len(before)
    assert [set(each.collectives) for each in after] == [
        set(each.collectives) for each in served.stock.after
    ]
    assert len({each.state["digest"] for each in after}) == 1


def test_in_a_new_process_pages_come_from_storage(
    served: Served, tmp_path: Path, model: Path
) -> None:
    """This test must run last, because it shuts the shared engine down."""
    served.engine.generate(REQUESTS, together=False)
    stuck = served.engine.shutdown()

    tp, store = len(served.stock.after), f"file://{served.store}"
    with lockstep_engine(tmp_path, model, tp=tp, store=store) as engine:
        answers = engine.generate(REQUESTS, together=False)

    assert stuck == []
    assert differences(served.stock.warm, answers, tolerance=TOLERANCE) == []
    assert by_tier(answers, "storage") > 0
