"""A model with a recurrent state, in SGLang's own pool for it, says with Lockstep what it says without.

Every other layer of the model is a short convolution, which goes on from its last inputs. SGLang keeps
them where a chunk of 64 tokens has ended and where a request has finished, and a hit ends only there.
"""

import random
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
from tests.kit.sglang.stock import PROBE, TOLERANCE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

CHUNK = 64
SHORT_CONV = "cpu_short_conv"
STATES: dict[str, Any] = {
    "page_size": 1,
    "mamba_radix_cache_strategy": "no_buffer",
    "disable_overlap_schedule": True,
    "chunked_prefill_size": CHUNK,
    "max_mamba_cache_size": 30,
    # Half as many bits would make another chunk another answer.
    "environment": {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
}
TIGHT: dict[str, Any] = {**STATES, "max_total_tokens": 700, "max_running_requests": 4}
"""A device pool of three of the longest prompts or so."""


def conversations(*, salt: str | None = None) -> list[Request]:
    """Return prompts with shared beginnings, some of which another one goes on from."""
    generator = random.Random(1)

    def text(length: int) -> list[int]:
        return [generator.randint(3, 499) for _ in range(length)]

    requests = list[Request]()
    for length in (190, 140, 250, 165):
        family = text(length)
        for shared in (60, length // 2, length):
            requests.append(Request(tokens=[*family[:shared], *text(20)], salt=salt))
        requests.append(Request(tokens=[*requests[-1].tokens, *text(30)], salt=salt))
    return requests


REQUESTS = conversations()
DECODING = [
    Request(tokens=range(300 - k, 400 - k), output_tokens=140, logprobs=False) for k in range(4)
]
"""They share no prefix, and outgrow together what `TIGHT` has for them."""


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
    with RunningEngine(folder, model, tp=tp, plugins=(PROBE, SHORT_CONV), **STATES) as engine:
        cold = engine.generate(REQUESTS, together=False)
        decoded = engine.generate(DECODING)
        return Stock(cold, decoded, [set(each.collectives) for each in engine.ranks()])


def tight_engine(
    folder: Path, model: Path, tp: int, store: Path | None = None, **options: Any
) -> RunningEngine:
    """Return an engine with Lockstep and little room on the device, not started.

    `options` are those of `lockstep_engine`.
    """
    return lockstep_engine(
        folder,
        model,
        tp=tp,
        store=None if store is None else f"file://{store}?durability=none",
        plugins=(*PLUGINS, SHORT_CONV),
        **{"extra": {"host_pages": 8000}, **TIGHT, **options},
    )


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, recurrent_model: Path
) -> Generator[Served]:
    """One rank, and two, with little room, a store of files, and retractions now and then."""
    tp: int = request.param
    folder = tmp_path_factory.mktemp(f"states{tp}")
    stock = run_stock(folder / "stock", recurrent_model, tp)
    store = folder / "store"
    with tight_engine(folder, recurrent_model, tp, store, faults={"retract_every": 50}) as engine:
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


def test_after_a_flush_a_prompt_goes_on_from_the_last_state_that_is_kept(served: Served) -> None:
    prompt = [*range(5, 155)]
    longer = Request(tokens=[*prompt, *range(300, 320)])
    served.engine.generate([Request(tokens=prompt), longer], together=False)
    served.engine.flush()

    again, shorter = served.engine.generate(
        [longer, Request(tokens=[*prompt[:100], 7, 8])], together=False
    )

    # The whole prompt was computed once, and ended there; of the other one a chunk has.
    assert (by_tier([again], "host"), shorter.cached_tokens) == (150, CHUNK)


def test_after_a_flush_answers_are_the_same(served: Served) -> None:
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
    assert cached_under_salts(served.engine) == [0, 0, 3 * CHUNK]


def test_aborts_of_what_waits_and_of_what_runs_leave_nothing_behind(served: Served) -> None:
    finished, left = abort_beside_a_long_one(served.engine)

    assert finished == ["length", "abort", "abort"]
    assert left == [(0, 0)] * len(served.stock.collectives)


def test_aborts_of_what_could_be_loaded_leave_what_comes_after_them_as_it_is(
    served: Served,
) -> None:
    answers = answers_after_aborts(served.engine, REQUESTS)

    assert differences(served.stock.cold, answers, tolerance=TOLERANCE) == []


def test_in_a_new_process_of_either_tp_size_states_come_from_storage(
    served: Served, tmp_path: Path, recurrent_model: Path
) -> None:
    """The last one that uses this engine."""
    served.engine.generate(REQUESTS, together=False)
    stuck = served.engine.shutdown()
    found = list[list[Answer]]()
    for tp in (1, 2):
        with tight_engine(tmp_path / str(tp), recurrent_model, tp, served.store) as engine:
            found.append(engine.generate(REQUESTS, together=False))

    told = [differences(served.stock.cold, each, tolerance=TOLERANCE) for each in found]
    assert (stuck, told) == ([], [[], []])
    assert min(by_tier(each, "storage") for each in found) > 0


@pytest.mark.slow
def test_requests_that_are_retracted_all_the_time_say_the_same(
    tmp_path: Path, recurrent_model: Path
) -> None:
    stock = run_stock(tmp_path / "stock", recurrent_model, 2)
    with tight_engine(tmp_path, recurrent_model, 2, faults={"retract_every": 5}) as engine:
        answers = engine.generate(DECODING)

    assert differences(stock.decoded, answers) == []
    assert sum(answer.retractions for answer in answers) > len(answers)


def test_many_at_once_with_the_fewest_slots_for_states_say_the_same(
    tmp_path: Path, recurrent_model: Path
) -> None:
    """Three slots for each request are what SGLang needs itself; host memory holds few states, too."""
    generator = random.Random(4)
    lots = [generator.sample(REQUESTS, len(REQUESTS)) for _ in range(8)]
    with RunningEngine(
        tmp_path / "stock", recurrent_model, tp=1, plugins=(PROBE, SHORT_CONV), **STATES
    ) as engine:
        expected = {tuple(each.tokens): engine.generate([each]) for each in REQUESTS}
    crowded = tight_engine(
        tmp_path,
        recurrent_model,
        1,
        tmp_path / "store",
        max_mamba_cache_size=9,
        extra={"host_pages": 1500},
        faults={"retract_every": 7},
    )
    with crowded as engine:
        running = [engine.send(lot, watched=False) for lot in lots]
        answers = [answer for each in running for answer in each.answers()]
        engine.flush()
        [report] = engine.ranks()

    wanted = [expected[tuple(each.tokens)][0] for lot in lots for each in lot]
    assert differences(wanted, answers, tolerance=TOLERANCE) == []
    assert (report.state["loading"], report.state["keeping"]) == (0, 0)
    assert report.state["loads"] > 0


@pytest.mark.parametrize("pool", ["attention", "states"])
def test_a_poisoned_page_of_either_pool_shows_if_it_is_loaded(
    pool: str, tmp_path: Path, recurrent_model: Path
) -> None:
    requests = [REQUESTS[3], REQUESTS[7], REQUESTS[15]]
    faults = {f"{pool}_poisoned_on_rank": 0}
    with tight_engine(tmp_path, recurrent_model, 1, faults=faults) as engine:
        cold = engine.generate(requests, together=False)
        engine.flush()
        poisoned = engine.generate(requests, together=False)

    assert by_tier(poisoned, "host") > 0
    assert len(differences(cold, poisoned, tolerance=10 * TOLERANCE)) == len(cold)


def test_a_load_that_fails_on_one_rank_is_computed_on_all(
    tmp_path: Path, recurrent_model: Path
) -> None:
    with tight_engine(tmp_path, recurrent_model, 2, faults={"loads_fail_on_rank": 1}) as engine:
        cold = engine.generate(REQUESTS, together=False)
        engine.flush()
        again = engine.generate(REQUESTS, together=False)
        # SGLang dies where it idles if a slot is lost.
        engine.flush()
        reports = engine.ranks()

    assert differences(cold, again, tolerance=TOLERANCE) == []
    assert by_tier(again, "host") == 0
    assert min(each.state["loads_failed"] for each in reports) > 0
