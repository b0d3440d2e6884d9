"""All ways to load weights into a running engine: no request finds KV of other weights."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Answer, Request, differences
from tests.kit.sglang.stock import TOLERANCE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPT = Request(tokens=range(3, 211), output_tokens=4)
KEPT = 192
"""Number of prompt tokens that a hit can cover: whole pages, without the prompt's last token."""


@pytest.fixture
def engine(tmp_path: Path, model: Path) -> Generator[RunningEngine]:
    with lockstep_engine(tmp_path, model, tp=1, store=f"file://{tmp_path}/store") as engine:
        yield engine


def answer(engine: RunningEngine) -> Answer:
    """Flush the device cache and answer the prompt."""
    engine.flush()
    return engine.generate([PROMPT])[0]


def send(engine: RunningEngine, path: Path, part: int = 0, parts: int = 1) -> None:
    sent = engine.ask("send_weights", path=str(path), part=part, parts=parts, weight_version="2")
    assert sent[0], sent


@pytest.fixture
def trained(tmp_path: Path, other_model: Path) -> Answer:
    with lockstep_engine(tmp_path / "trained", other_model, tp=1) as engine:
        return engine.generate([PROMPT])[0]


def test_what_half_of_the_new_weights_have_computed_is_never_found(
    engine: RunningEngine, model: Path, other_model: Path, trained: Answer
) -> None:
    engine.ask("begin_update")
    send(engine, other_model, 0, 2)
    half = engine.generate([PROMPT])[0]
    send(engine, other_model, 1, 2)
    engine.ask("end_update")
    whole, again = answer(engine), answer(engine)

    assert differences([trained], [half], tolerance=10 * TOLERANCE) != []
    assert differences([trained] * 2, [whole, again], tolerance=TOLERANCE) == []
    assert (whole.cached_tokens, again.cached_tokens) == (0, KEPT)

    # Send the same weights and version in a second update session. A hit must be KV of the complete
    # weights, never of half of them.
    assert engine.update_weights(model)[0]
    engine.ask("begin_update")
    send(engine, other_model)
    engine.ask("end_update")
    back = answer(engine)

    assert differences([trained], [back], tolerance=TOLERANCE) == []
    assert back.cached_tokens == KEPT
