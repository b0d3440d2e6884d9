"""Operator commands for SGLang on two ranks, each with a scheduler."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep import ask
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import differences
from tests.kit.sglang.stock import TOLERANCE, Stock, mixed_requests

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = mixed_requests(12)


def test_an_engine_does_what_it_is_asked_under_load_and_while_it_is_idle(
    tmp_path: Path, model: Path, stock_tp2: Stock
) -> None:
    socket, store = tmp_path / "s", tmp_path / "kv"
    tokens = list(REQUESTS[0].tokens)

    def call(what: str, **fields: Any) -> Any:
        return ask(socket, what, **fields)

    with (
        lockstep_engine(tmp_path / "engine", model, extra={"control": str(socket)}) as engine,
        ThreadPoolExecutor(1) as threads,
    ):
        engine.generate(REQUESTS)
        under_load = threads.submit(engine.generate, REQUESTS)
        pinned = call("pin", name="p", tokens=tokens)
        limited = call("limit", namespace="*", host_pages=1000)
        call("attach", store=store.as_uri())
        answers = under_load.result()
        engine.generate(REQUESTS)
        flushed = call("flush")
        listed = call("list")
        call("detach")
        call("unpin", name="p")
        left = call("list")
        steps = call("stats")["steps"]

    assert differences(stock_tp2.cold[:12], answers, tolerance=TOLERANCE) == []
    assert (limited, flushed["unwritten"]) == ({"is_known": True}, {})
    assert listed["pins"]["p"]["tokens"] == pinned["tokens"] > 0
    assert (listed["store"], left["store"], left["pins"]) == ("attached", "detached", {})
    assert steps > 0
    assert [each for each in store.rglob("*") if each.is_file()]
