"""After a fault on one rank, all ranks continue alike, or all end with a named error."""

from pathlib import Path

import pytest

from tests.kit.sglang.engine import EngineEndedError
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Request, differences
from tests.kit.sglang.stock import TOLERANCE, Stock, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = mixed_requests()
LONG = Request(tokens=range(3, 303), output_tokens=4)
SIZES_DIFFER = "Received data size doesn't match expected size"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A directory with a file store for each of two ranks, filled by one engine run."""
    folder = tmp_path_factory.mktemp("written")
    with lockstep_engine(folder, model, store=f"file://{folder}/{{rank}}") as engine:
        engine.generate(REQUESTS)
        assert engine.shutdown() == []
    return folder


def test_a_rank_that_lost_every_second_object_shortens_the_prefix_for_everyone(
    stores: Path, tmp_path: Path, model: Path, stock_tp2: Stock
) -> None:
    lost = sorted(path for path in (stores / "1" / "objects").rglob("*") if path.is_file())[::2]
    for path in lost:
        path.unlink()

    with lockstep_engine(tmp_path, model, store=f"file://{stores}/{{rank}}") as engine:
        answers = engine.generate(REQUESTS)
        states = [each.state for each in engine.ranks()]

    assert lost
    assert differences(stock_tp2.cold, answers, tolerance=TOLERANCE) == []
    assert states[0]["digest"] == states[1]["digest"]
    assert states[0]["rounds"] == states[1]["rounds"]


def test_ranks_that_compute_different_batches_are_named_beside_the_error_of_their_own_collective(
    tmp_path: Path, model: Path
) -> None:
    """If ranks compute different batches, the log names each rank's batch, beside SGLang's error."""
    with lockstep_engine(tmp_path, model, faults={"lie_on_rank": 1}) as engine:
        # The injected fault hides rank 1's hit for the second request, so its batch differs from rank
        # 0's.
        with pytest.raises(EngineEndedError):
            engine.generate([LONG, LONG], together=False)
        log = engine.log()

    assert SIZES_DIFFER in log
    assert "rank 1 failed in the batch ('EXTEND', [['request-1-1-', 0, 256]])" in log
