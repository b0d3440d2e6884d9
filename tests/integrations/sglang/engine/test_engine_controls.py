"""What else SGLang does with its cache: retraction, new weights, sleep, stores that come and go."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Answer, Request, differences
from tests.kit.sglang.stock import TOLERANCE, Stock, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = mixed_requests(12)
LONG = Request(tokens=range(3, 303), output_tokens=120)
SHORT = Request(tokens=range(3, 303), output_tokens=4)
CROWD = [
    Request(tokens=range(3 + at, 103 + at), output_tokens=40, logprobs=False) for at in range(24)
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Generator[RunningEngine]:
    """Two ranks with a store, for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("lockstep")
    store = f"file://{folder}/store"
    with lockstep_engine(folder, model, store=store, enable_metrics=True) as started:
        yield started


def host_tokens(answers: list[Answer]) -> int:
    """How many tokens of all answers came from host memory."""
    return sum(answer.cached_by_tier.get("host", 0) for answer in answers)


@pytest.mark.slow
def test_fifty_retracted_requests_load_what_they_had_and_say_the_same(
    tmp_path: Path, model: Path
) -> None:
    """Pages of four tokens, since a request decodes only a few before its next retraction."""
    pages: dict[str, Any] = {"page_size": 4, "extra": {"host_pages": 4800}}
    with lockstep_engine(tmp_path / "all", model, faults={"retract_every": 5}, **pages) as engine:
        together = engine.generate(CROWD)
        states = [report.state for report in engine.ranks()]
    with lockstep_engine(tmp_path / "alone", model, **pages) as engine:
        alone = engine.generate(CROWD, together=False)

    assert differences(alone, together) == []
    assert sum(answer.retractions for answer in together) >= 50
    assert states[0]["retracted"] == states[1]["retracted"] > 0
    assert states[0]["loads"] == states[1]["loads"] >= states[0]["retracted"] / 2
    assert states[0]["digest"] == states[1]["digest"]


def test_what_a_request_with_less_than_a_page_decodes_is_kept_too(engine: RunningEngine) -> None:
    [first] = engine.generate([Request(tokens=range(3, 13), output_tokens=40)])
    engine.flush()

    [second] = engine.generate([Request(tokens=[*range(3, 13), *first.tokens])])

    assert second.cached_by_tier["host"] == 48


def test_weights_that_come_back_find_their_pages_in_host_memory(
    engine: RunningEngine, model: Path, other_model: Path, stock_tp2: Stock
) -> None:
    first = engine.generate(REQUESTS)

    trained = engine.update_weights(other_model)
    other = engine.generate(REQUESTS)
    back = engine.update_weights(model)
    again = engine.generate(REQUESTS)

    assert (trained[0], back[0]) == (True, True)
    assert differences(first, again, tolerance=TOLERANCE) == []
    assert differences(stock_tp2.cold[:12], again, tolerance=TOLERANCE) == []
    assert len(differences(first, other, tolerance=10 * TOLERANCE)) == 12
    assert host_tokens(again) > host_tokens(other)


def test_weights_are_updated_under_load_and_nothing_stale_is_served(
    engine: RunningEngine, model: Path, other_model: Path
) -> None:
    running = engine.send([LONG])
    running.wait_for(tokens=4)

    engine.pause("retract")
    update = engine.update_weights(other_model, "trained")
    engine.resume()
    [answer] = running.answers()
    trained = engine.generate([SHORT])
    back = engine.update_weights(model)
    original = engine.generate([SHORT])

    assert (update[0], back[0]) == (True, True)
    assert [each["version"] for each in answer.weight_versions][-1] == "trained"
    assert answer.retractions == 1
    assert trained[0].tokens != original[0].tokens


def test_an_engine_that_has_slept_answers_as_before(
    engine: RunningEngine, stock_tp2: Stock
) -> None:
    engine.flush()

    engine.ask("release_memory", tags=None)
    engine.ask("resume_memory", tags=None)
    answers = engine.generate(REQUESTS)

    assert differences(stock_tp2.cold[:12], answers, tolerance=TOLERANCE) == []


def test_a_store_is_detached_and_another_attached_while_the_engine_runs(
    engine: RunningEngine, tmp_path: Path, stock_tp2: Stock
) -> None:
    engine.flush()

    detached = engine.ask("detach_storage")
    without = engine.generate(REQUESTS)
    engine.flush()
    refused = engine.ask("attach_storage", hicache_storage_backend="file")
    attached = engine.ask(
        "attach_storage",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config_json=f'{{"store": "file://{tmp_path}/other"}}',
    )
    answers = engine.generate(REQUESTS)

    assert (detached[0], refused[0], attached[0]) == (True, False, True)
    assert "Lockstep's is 'dynamic'" in refused[1]
    assert differences(stock_tp2.cold[:12], without, tolerance=TOLERANCE) == []
    assert differences(stock_tp2.cold[:12], answers, tolerance=TOLERANCE) == []
    assert {answer.cached_by_tier["storage_backend"] for answer in answers[1:]} == {"file"}


@pytest.mark.parametrize(
    "metric",
    [
        "hicache_host_used_tokens",
        "hicache_host_total_tokens",
        "hicache_backup_bytes_total",
        "load_back_bytes_total",
    ],
)
def test_sglang_s_metrics_tell_of_host_memory_and_copies(
    engine: RunningEngine, metric: str
) -> None:
    engine.generate(REQUESTS)
    engine.flush()
    engine.generate(REQUESTS)

    lines = engine.ask("metrics").splitlines()

    told = [line for line in lines if line.startswith(f"sglang:{metric}{{")]
    assert told
    assert float(told[0].rpartition(" ")[2]) > 0


def test_ranks_that_are_asked_to_close_end_in_time(engine: RunningEngine) -> None:
    """The last one that uses this engine."""
    assert engine.shutdown() == []
