"""In SGLang, a request with an adapter hits only pages computed with the same adapter weights."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import CROWDED, lockstep_flags
from tests.kit.sglang.requests import Answer, Request, differences
from tests.kit.sglang.stock import PROBE, TOLERANCE, adapters_engine
from tests.kit.sglang.tiny_models import make_llama_adapter

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

NAMES = (None, "one", "other", "one")
REQUESTS = [Request(tokens=range(9, 209), adapter=name) for name in NAMES]


def served(engine: RunningEngine, adapters: Path, *, overwritten: bool = False) -> list[Answer]:
    """Load both adapters, and answer the same prompt with each.

    With `overwritten`, other weights are written to each adapter's files once SGLang has loaded the
    adapter.
    """
    with engine:
        for seed, name in enumerate(("one", "other"), start=3):
            engine.ask("load_adapter", name=name, path=str(adapters / name))
            if overwritten:
                make_llama_adapter(adapters / name, seed=seed)
        answers = engine.generate(REQUESTS, together=False)
        assert engine.shutdown() == []
        return answers


def test_adapters_share_nothing_and_are_found_in_storage_by_their_weights_after_a_restart(
    tmp_path: Path, model: Path
) -> None:
    make_llama_adapter(tmp_path / "one", seed=1)
    make_llama_adapter(tmp_path / "other", seed=2)
    flags: dict[str, Any] = {
        **CROWDED,
        **lockstep_flags(f"file://{tmp_path}/store"),
        "plugins": ("lockstep", PROBE, "cpu_adapters"),
    }

    stock = served(adapters_engine(tmp_path / "stock", model), tmp_path)
    cold = served(adapters_engine(tmp_path / "cold", model, **flags), tmp_path)
    restarted = served(
        adapters_engine(
            tmp_path / "restarted", model, faults={"adapters_late_on_rank": 1}, **flags
        ),
        tmp_path,
        overwritten=True,
    )

    assert differences(stock, cold, tolerance=TOLERANCE) == []
    assert differences(stock, restarted, tolerance=TOLERANCE) == []
    assert [answer.cached_tokens for answer in cold] == [0, 0, 0, 192]
    assert [answer.cached_by_tier["storage"] for answer in restarted] == [192, 192, 192, 0]
