"""A model with sliding windows, in SGLang's own pool for them, says with Lockstep what it says without.

Every other layer of the model attends to 64 tokens, and prompts are several times as long: what they
have left behind is gone from the windows' pool, and what is loaded has windows at its end only.
"""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.counting import by_tier, growth, rounds_beyond_iterations
from tests.kit.sglang.engine import PLUGINS, RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Answer, Request, differences
from tests.kit.sglang.salts_and_aborts import (
    abort_beside_a_long_one,
    answers_after_aborts,
    cached_under_salts,
)
from tests.kit.sglang.stock import PROBE, TOLERANCE, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = [*mixed_requests(11), Request(tokens=range(2, 502))]
DECODING = [
    Request(tokens=range(300 - k, 400 - k), output_tokens=140, logprobs=False) for k in range(6)
]
"""They share no prefix, and outgrow together what `TIGHT` has for them."""

WINDOWS = "cpu_windows"
TIGHT: dict[str, Any] = {
    "max_total_tokens": 1024,
    "max_running_requests": 6,
    "chunked_prefill_size": 128,
}
FREED_AT_ONCE = {"SGLANG_SWA_EVICTION_INTERVAL": "1"}
"""SGLang frees a window that a request has left in the next step, not after 128 tokens."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What stock SGLang says on some number of ranks."""

    cold: list[Answer]
    decoded: list[Answer]
    collectives: list[set[str]]
    """By rank."""


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and what stock SGLang says on as many ranks."""

    engine: RunningEngine
    stock: Stock
    store: Path


def run_stock(folder: Path, model: Path, tp: int) -> Stock:
    """Return what stock SGLang says that has room for everything."""
    with RunningEngine(folder, model, tp=tp, plugins=(PROBE, WINDOWS)) as engine:
        cold = engine.generate(REQUESTS, together=False)
        decoded = engine.generate(DECODING)
        return Stock(cold, decoded, [set(each.collectives) for each in engine.ranks()])


def tight_engine(folder: Path, model: Path, tp: int, store: Path, **faults: int) -> RunningEngine:
    """Return an engine with Lockstep and little room on the device, not started."""
    return lockstep_engine(
        folder,
        model,
        tp=tp,
        store=f"file://{store}",
        plugins=(*PLUGINS, WINDOWS),
        faults=faults,
        environment=FREED_AT_ONCE,
        **TIGHT,
    )


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, windowed_model: Path
) -> Generator[Served]:
    """One rank, and two, with little room, a store of files, and retractions now and then."""
    tp: int = request.param
    folder = tmp_path_factory.mktemp(f"windows{tp}")
    stock = run_stock(folder / "stock", windowed_model, tp)
    store = folder / "store"
    with tight_engine(folder, windowed_model, tp, store, retract_every=50) as engine:
        yield Served(engine, stock, store)


def test_cold_and_warm_from_host_memory(served: Served) -> None:
    cold = served.engine.generate(REQUESTS, together=False)
    warm = served.engine.generate(REQUESTS, together=False)
    together = served.engine.generate(REQUESTS)

    assert differences(served.stock.cold, cold, tolerance=TOLERANCE) == []
    assert differences(served.stock.cold, warm, tolerance=TOLERANCE) == []
    assert differences(served.stock.cold, together, tolerance=TOLERANCE) == []
    assert by_tier(warm, "host") > by_tier(warm, "device")


def test_each_iteration_has_one_round_and_no_other_collective_of_the_tiers(served: Served) -> None:
    before = served.engine.ranks()
    served.engine.generate(REQUESTS)
    after = served.engine.ranks()

    assert rounds_beyond_iterations(before, after) == [0] * len(before)
    assert [set(each.collectives) for each in after] == served.stock.collectives
    assert len({each.state["digest"] for each in after}) == 1


def test_after_a_flush_pages_come_from_host_memory(served: Served) -> None:
    served.engine.generate(REQUESTS)
    served.engine.flush()

    answers = served.engine.generate(REQUESTS, together=False)

    assert differences(served.stock.cold, answers, tolerance=TOLERANCE) == []
    assert by_tier(answers, "host") > by_tier(answers, "device")


def test_what_retracted_requests_had_decoded_is_loaded_and_not_computed_again(
    served: Served,
) -> None:
    served.engine.flush()
    before = served.engine.ranks()
    answers = served.engine.generate(DECODING)
    after = served.engine.ranks()

    assert differences(served.stock.decoded, answers) == []
    assert sum(answer.retractions for answer in answers) > 0
    assert min(growth(before, after, "retracted")) > 0
    # Nothing of these prompts was computed before, so that whatever is loaded was saved of them.
    assert min(growth(before, after, "loaded_tokens")) > 0


def test_two_salts_share_nothing(served: Served) -> None:
    assert cached_under_salts(served.engine) == [0, 0, 192]


def test_aborts_of_what_waits_and_of_what_runs_leave_nothing_behind(served: Served) -> None:
    finished, left = abort_beside_a_long_one(served.engine)

    assert finished == ["length", "abort", "abort"]
    assert left == [(0, 0)] * len(served.stock.collectives)


def test_aborts_of_what_could_be_loaded_leave_what_comes_after_them_as_it_is(
    served: Served,
) -> None:
    answers = answers_after_aborts(served.engine, REQUESTS)

    assert differences(served.stock.cold, answers, tolerance=TOLERANCE) == []


def test_in_a_new_process_pages_come_from_storage(
    served: Served, tmp_path: Path, windowed_model: Path
) -> None:
    """The last one that uses this engine."""
    served.engine.generate(REQUESTS, together=False)
    stuck = served.engine.shutdown()

    tp = len(served.stock.collectives)
    with tight_engine(tmp_path, windowed_model, tp, served.store) as engine:
        answers = engine.generate(REQUESTS, together=False)

    assert stuck == []
    assert differences(served.stock.cold, answers, tolerance=TOLERANCE) == []
    assert by_tier(answers, "storage") > 0


@pytest.mark.parametrize("pool", ["attention", "windows"])
def test_a_poisoned_page_of_either_pool_shows_if_it_is_loaded(
    pool: str, tmp_path: Path, windowed_model: Path
) -> None:
    faults, plugins = {f"{pool}_poisoned_on_rank": 0}, (*PLUGINS, WINDOWS)
    with lockstep_engine(tmp_path, windowed_model, tp=1, plugins=plugins, faults=faults) as engine:
        cold = engine.generate(REQUESTS[:3], together=False)
        engine.flush()
        poisoned = engine.generate(REQUESTS[:3], together=False)

    assert by_tier(poisoned, "host") > 0
    assert len(differences(cold, poisoned, tolerance=10 * TOLERANCE)) == len(cold)


def test_what_was_shared_is_written_with_the_window_before_its_end(
    tmp_path: Path, windowed_model: Path
) -> None:
    """Under `write_through_selective`, where a backup ends before the prompt does."""
    shared = [*range(2, 194)]
    tails = [Request(tokens=[*shared, *range(at, at + 70)]) for at in range(200, 400, 40)]
    engine = lockstep_engine(
        tmp_path,
        windowed_model,
        tp=1,
        plugins=(*PLUGINS, WINDOWS),
        hicache_write_policy="write_through_selective",
    )
    with engine:
        cold = engine.generate(tails, together=False)
        engine.flush()
        again = engine.generate(tails[-1:])

    assert differences(cold[-1:], again, tolerance=TOLERANCE) == []
    assert by_tier(again, "host") == len(shared)
