"""Ways in which weights come to a running engine: nothing that others computed is ever found."""

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
"""So many tokens of the prompt can be found: whole pages, and less than all of it."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Generator[RunningEngine]:
    folder = tmp_path_factory.mktemp("lockstep")
    with lockstep_engine(folder, model, tp=1, store=f"file://{folder}/store") as engine:
        yield engine


@pytest.fixture
def engine(started: RunningEngine, model: Path) -> RunningEngine:
    """An engine with the first model's weights, under the name that they have from the start."""
    assert started.update_weights(model)[0]
    return started


def answer(engine: RunningEngine) -> Answer:
    """Answer the prompt with nothing on the device."""
    engine.flush()
    return engine.generate([PROMPT])[0]


def send(engine: RunningEngine, path: Path, part: int = 0, parts: int = 1) -> None:
    """Send weights, all or a part, under the version 2."""
    sent = engine.ask("send_weights", path=str(path), part=part, parts=parts, weight_version="2")
    assert sent[0], sent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, other_model: Path) -> Answer:
    """What the other model says."""
    with lockstep_engine(tmp_path_factory.mktemp("trained"), other_model, tp=1) as engine:
        return engine.generate([PROMPT])[0]


def write(engine: RunningEngine, path: Path) -> None:
    """Let another process write weights in the place of those of now."""
    engine.ask("begin_update")
    engine.ask("rpc", method="lockstep_write_weights", keywords={"path": str(path)})
    engine.ask("end_update")


def test_weights_that_another_process_wrote_in_a_session_find_nothing_of_before(
    engine: RunningEngine, other_model: Path, trained: Answer
) -> None:
    first = answer(engine)

    write(engine, other_model)
    written, again = answer(engine), answer(engine)

    assert differences([trained], [written], tolerance=TOLERANCE) == []
    assert differences([trained], [first], tolerance=10 * TOLERANCE) != []
    assert (written.cached_tokens, again.cached_tokens) == (0, KEPT)


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

    # Under the same name in another session: what is found of it is of whole weights.
    assert engine.update_weights(model)[0]
    engine.ask("begin_update")
    send(engine, other_model)
    engine.ask("end_update")
    back = answer(engine)

    assert differences([trained], [back], tolerance=TOLERANCE) == []
    assert back.cached_tokens == KEPT


def test_an_update_from_files_that_are_not_there_leaves_all_as_it_was(
    engine: RunningEngine, tmp_path: Path
) -> None:
    first = answer(engine)

    failed = engine.update_weights(tmp_path / "mistyped")
    second = answer(engine)

    assert failed[0] is False
    assert second.cached_tokens == KEPT
    assert differences([first], [second], tolerance=TOLERANCE) == []


def test_an_update_without_a_flush_of_an_empty_engine_turns_nothing_off(
    engine: RunningEngine, other_model: Path, trained: Answer
) -> None:
    answer(engine)
    engine.flush()

    assert engine.update_weights(other_model, "3", flush_cache=False)[0]
    first = engine.generate([PROMPT])[0]
    second = answer(engine)

    assert differences([trained] * 2, [first, second], tolerance=TOLERANCE) == []
    assert (first.cached_tokens, second.cached_tokens) == (0, KEPT)


def test_an_update_without_a_flush_caches_nothing_until_the_tree_is_emptied(
    engine: RunningEngine, other_model: Path, trained: Answer
) -> None:
    answer(engine)

    assert engine.update_weights(other_model, "4", flush_cache=False)[0]
    engine.generate([PROMPT])
    after = answer(engine)

    assert after.cached_tokens == 0
    assert differences([trained], [after], tolerance=TOLERANCE) == []
