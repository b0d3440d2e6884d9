"""On real SGLang engines: retraction, new weights, sleep, and attaching and detaching stores."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import by_tier, differences
from tests.kit.sglang.stock import TOLERANCE, Stock, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = mixed_requests(12)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Generator[RunningEngine]:
    """Two ranks with a store, shared by tests that leave the engine unchanged."""
    folder = tmp_path_factory.mktemp("lockstep")
    store = f"file://{folder}/store"
    with lockstep_engine(folder, model, store=store, enable_metrics=True) as started:
        yield started


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
    assert by_tier(again, "host") > by_tier(other, "host")


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
    assert "must be 'dynamic'" in refused[1]
    assert differences(stock_tp2.cold[:12], without, tolerance=TOLERANCE) == []
    assert differences(stock_tp2.cold[:12], answers, tolerance=TOLERANCE) == []
    assert {answer.cached_by_tier["storage_backend"] for answer in answers[1:]} == {"file"}


def test_sglang_s_metrics_tell_of_host_memory_and_copies(engine: RunningEngine) -> None:
    engine.generate(REQUESTS)
    engine.flush()
    engine.generate(REQUESTS)

    lines = engine.ask("metrics").splitlines()

    names = ("hicache_host_used_tokens", "hicache_backup_bytes_total", "load_back_bytes_total")
    values = [
        [float(each.rpartition(" ")[2]) for each in lines if each.startswith(f"sglang:{name}{{")]
        for name in names
    ]
    assert [max(each) > 0 for each in values] == [True] * len(names)
