"""Models with sliding windows or recurrent states answer as with stock SGLang.

Every other layer attends to 64 tokens, or is a short convolution over its last inputs. Prompts are
several times as long as a window. SGLang keeps a state at the end of each chunk of 64 tokens and at the
end of each request, and a hit can end only at a kept state.
"""

import random
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.engine import PLUGINS, RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import (
    Answer,
    Request,
    by_tier,
    differences,
    growth,
    rounds_beyond_iterations,
)
from tests.kit.sglang.stock import PROBE, TOLERANCE, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


def conversations() -> list[Request]:
    """Return prompts with shared prefixes, some of which continue another prompt."""
    generator = random.Random(1)

    def text(length: int) -> list[int]:
        return [generator.randint(3, 499) for _ in range(length)]

    requests = list[Request]()
    for length in (190, 140, 250, 165):
        family = text(length)
        for shared in (60, length // 2, length):
            requests.append(Request(tokens=[*family[:shared], *text(20)]))
        requests.append(Request(tokens=[*requests[-1].tokens, *text(30)]))
    return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    fixture: str
    plugin: str
    requests: list[Request]
    decoding: int
    """Number of concurrent requests. With the engine settings `tight`, the device pools are too small
    for all of them."""
    arguments: dict[str, Any]
    tight: dict[str, Any]
    """Engine settings that make the device pools small."""


KINDS = {
    "windows": Kind(
        fixture="windowed_model",
        plugin="cpu_windows",
        requests=[*mixed_requests(11), Request(tokens=range(2, 502))],
        decoding=6,
        arguments={},
        tight={
            "max_total_tokens": 1024,
            "max_running_requests": 6,
            "chunked_prefill_size": 128,
            # SGLang frees pages outside a request's window every 128 tokens by default; this setting
            # frees them in the next step.
            "environment": {"SGLANG_SWA_EVICTION_INTERVAL": "1"},
        },
    ),
    "states": Kind(
        fixture="recurrent_model",
        plugin="cpu_short_conv",
        requests=conversations(),
        decoding=4,
        arguments={
            "page_size": 1,
            "mamba_radix_cache_strategy": "no_buffer",
            "disable_overlap_schedule": True,
            "chunked_prefill_size": 64,
            "max_mamba_cache_size": 30,
            # Use float32, because 16-bit states depend on the chunks into which a prompt is divided.
            "environment": {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
        },
        tight={
            "max_total_tokens": 700,
            "max_running_requests": 4,
            "extra": {"host_pages": 8000},
        },
    ),
}


def decoding(kind: Kind) -> list[Request]:
    return [
        Request(tokens=range(300 - k, 400 - k), output_tokens=140, logprobs=False)
        for k in range(kind.decoding)
    ]


@dataclass(frozen=True, slots=True)
class Stock:
    cold: list[Answer]
    decoded: list[Answer]
    collectives: list[set[str]]
    """The collectives that each rank called, by rank."""


@dataclass(frozen=True, slots=True)
class Served:
    kind: Kind
    model: Path
    engine: RunningEngine
    stock: Stock
    store: Path


def run_stock(folder: Path, model: Path, kind: Kind) -> Stock:
    plugins = (PROBE, kind.plugin)
    with RunningEngine(folder, model, tp=2, plugins=plugins, **kind.arguments) as engine:
        cold = engine.generate(kind.requests, together=False)
        decoded = engine.generate(decoding(kind))
        return Stock(cold, decoded, [set(each.collectives) for each in engine.ranks()])


def tight_engine(
    folder: Path, model: Path, kind: Kind, tp: int, store: Path | None = None, **faults: int
) -> RunningEngine:
    """Return an engine, not yet started, with Lockstep and small device pools."""
    return lockstep_engine(
        folder,
        model,
        tp=tp,
        store=None if store is None else f"file://{store}?durability=none",
        plugins=(*PLUGINS, kind.plugin),
        faults=faults,
        **(kind.arguments | kind.tight),
    )


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    """Two ranks with little device memory, a file store, and occasional retractions."""
    kind = KINDS[request.param]
    model: Path = request.getfixturevalue(kind.fixture)
    folder = tmp_path_factory.mktemp("hybrid")
    stock = run_stock(folder / "stock", model, kind)
    store = folder / "store"
    with tight_engine(folder, model, kind, 2, store, retract_every=50) as engine:
        yield Served(kind, model, engine, stock, store)


def test_it_is_exact_cold_and_warm_with_one_round_in_each_iteration(served: Served) -> None:
    before = served.engine.ranks()
    cold = served.engine.generate(served.kind.requests, together=False)
    warm = served.engine.generate(served.kind.requests, together=False)
    together = served.engine.generate(served.kind.requests)
    after = served.engine.ranks()

    mismatches = [
        differences(served.stock.cold, each, tolerance=TOLERANCE) for each in (cold, warm, together)
    ]
    assert mismatches == [[], [], []]
    assert by_tier(warm, "host") > by_tier(warm, "device")
    assert rounds_beyond_iterations(before, after) == [0, 0]
    assert [set(each.collectives) for each in after] == served.stock.collectives
    assert len({each.state["digest"] for each in after}) == 1


def test_what_retracted_requests_had_decoded_is_loaded_and_not_computed_again(
    served: Served,
) -> None:
    served.engine.flush()
    before = served.engine.ranks()
    answers = served.engine.generate(decoding(served.kind))
    after = served.engine.ranks()

    assert differences(served.stock.decoded, answers) == []
    assert sum(answer.retractions for answer in answers) > 0
    assert min(growth(before, after, "retracted")) > 0
    # These prompts are new, so all loaded tokens were backed up during this test.
    assert min(growth(before, after, "loaded_tokens")) > 0


def test_aborts_leave_nothing_behind_and_what_comes_after_them_as_it_is(served: Served) -> None:
    engine, requests = served.engine, served.kind.requests
    long = Request(tokens=range(3, 303), output_tokens=120)
    waiting = Request(tokens=range(5, 205), output_tokens=120, abort_after=0)
    running = Request(tokens=range(7, 207), output_tokens=120, abort_after=3)
    finished = [answer.finish for answer in engine.generate([long, waiting, running])]
    engine.flush()
    left = [(each.state["loading"], each.state["keeping"]) for each in engine.ranks()]
    engine.generate(requests)
    engine.flush()
    # Abort requests that match cached prompts, before any load of these prompts begins.
    engine.generate([Request(tokens=each.tokens, abort_after=0) for each in requests])
    engine.flush()
    answers = engine.generate(requests, together=False)

    assert (finished, left) == (["length", "abort", "abort"], [(0, 0)] * 2)
    assert differences(served.stock.cold, answers, tolerance=TOLERANCE) == []
    assert by_tier(answers, "host") > by_tier(answers, "device")


def test_in_a_new_process_of_either_tp_size_they_come_from_storage(
    served: Served, tmp_path: Path
) -> None:
    """This test must run last, because it shuts the shared engine down."""
    kind, found = served.kind, list[list[Answer]]()
    served.engine.generate(kind.requests, together=False)
    stuck = served.engine.shutdown()
    for tp in (1, 2):
        with tight_engine(tmp_path / str(tp), served.model, kind, tp, served.store) as engine:
            found.append(engine.generate(kind.requests, together=False))

    mismatches = [differences(served.stock.cold, each, tolerance=TOLERANCE) for each in found]
    assert (stuck, mismatches) == ([], [[], []])
    assert min(by_tier(each, "storage") for each in found) > 0


@pytest.mark.parametrize(
    ("name", "pool"),
    [("windows", "attention"), ("windows", "windows"), ("states", "states")],
)
def test_a_poisoned_page_of_either_pool_shows_if_it_is_loaded(
    name: str, pool: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = KINDS[name]
    model: Path = request.getfixturevalue(kind.fixture)
    requests = [kind.requests[at] for at in (-1, 3, 7)]
    faults = {f"{pool}_poisoned_on_rank": 0}
    with tight_engine(tmp_path, model, kind, 1, None, **faults) as engine:
        cold = engine.generate(requests, together=False)
        engine.flush()
        poisoned = engine.generate(requests, together=False)

    assert by_tier(poisoned, "host") > 0
    assert len(differences(cold, poisoned, tolerance=10 * TOLERANCE)) == len(cold)


def test_what_was_shared_is_written_with_the_window_before_its_end(
    tmp_path: Path, windowed_model: Path
) -> None:
    """Under `write_through_selective`, the backup of a shared prefix includes the window at its end."""
    shared = [*range(2, 194)]
    tails = [Request(tokens=[*shared, *range(at, at + 70)]) for at in range(200, 400, 40)]
    engine = lockstep_engine(
        tmp_path,
        windowed_model,
        tp=1,
        plugins=(*PLUGINS, "cpu_windows"),
        hicache_write_policy="write_through_selective",
    )
    with engine:
        cold = engine.generate(tails, together=False)
        engine.flush()
        again = engine.generate(tails[-1:])

    assert differences(cold[-1:], again, tolerance=TOLERANCE) == []
    assert by_tier(again, "host") == len(shared)
