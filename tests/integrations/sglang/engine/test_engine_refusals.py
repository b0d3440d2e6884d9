"""What cannot be served is refused by name when the engine starts."""

from pathlib import Path

import pytest

from tests.kit.sglang.engine import EngineEndedError
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Request

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


def test_a_configuration_that_cannot_be_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    engine = lockstep_engine(tmp_path, model, extra={"stroe": "file:///kv"})

    with pytest.raises(EngineEndedError), engine:
        pass

    # Every rank refuses; SGLang ends them all once the first one has, which may be before another.
    assert "there is no key 'stroe'" in engine.log()


def test_it_is_found_by_its_entry_point_where_every_process_starts_afresh(
    tmp_path: Path, model: Path
) -> None:
    with lockstep_engine(tmp_path, model, tp=1, fresh=True) as engine:
        [first, again] = engine.generate([Request(tokens=range(3, 103))] * 2, together=False)
        [report] = engine.ranks()

    assert report.cache == "LockstepRadixCache"
    assert (first.cached_tokens, again.cached_tokens) == (0, 96)
    assert "Lockstep under SGLang" in engine.log()
