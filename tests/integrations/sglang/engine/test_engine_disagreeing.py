"""Ranks stay equal for ten thousand iterations in which one rank's store fails in many ways."""

from pathlib import Path

import pytest

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import differences
from tests.kit.sglang.stock import TOLERANCE, Stock, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

ITERATIONS = 10_000
REQUESTS = mixed_requests()


def serve(engine: RunningEngine, stock: Stock, iterations: int) -> list[str]:
    """Repeat the requests for `iterations` scheduler iterations; return the wrong answers."""
    mismatches: list[str] = []
    done = 0
    while done < iterations:
        engine.flush()
        mismatches += differences(stock.cold, engine.generate(REQUESTS), tolerance=TOLERANCE)
        done = engine.ranks()[0].iterations
    return mismatches


def test_ranks_whose_stores_disagree_stay_alike_for_ten_thousand_iterations(
    tmp_path: Path, model: Path, stock_tp2: Stock
) -> None:
    store = f"file://{tmp_path}/{{rank}}"
    few = {"host_pages": 200}
    faults = {"store_fails_on_rank": 1}
    with lockstep_engine(tmp_path, model, store=store, extra=few, faults=faults) as engine:
        mismatches = serve(engine, stock_tp2, ITERATIONS)
        reports = engine.ranks()
        stuck = engine.shutdown()

    first, second = reports
    assert mismatches == []
    assert stuck == []
    assert first.iterations >= ITERATIONS
    assert first.state["digest"] == second.state["digest"]
    assert first.iterations == second.iterations
    rounds = {each.state[name] for each in reports for name in ("rounds", "collectives")}
    assert len(rounds) == 1
    assert second.state["pages_corrupt"] > 0
