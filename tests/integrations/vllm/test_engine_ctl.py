"""Operator commands for `vllm serve -tp 2`, which has one scheduler for both workers."""

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep import LockstepError, ask
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.pd_proxy import ask as complete
from tests.kit.vllm.plan import BLOCK_TOKENS
from tests.kit.vllm.served import make_model, served
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = [list(each.tokens) for each in mixed_prompts(12)]


class Users:
    def __init__(self, address: str, model: Path) -> None:
        self._address = address
        self._common_fields = {"model": str(model), "max_tokens": 8, "temperature": 0}
        self._end = threading.Event()
        self.answered = self.cached_tokens = 0

    def ask(self, tokens: list[int]) -> str:
        answer = complete(self._address, self._common_fields | {"prompt": tokens})
        self.answered += 1
        details: dict[str, int] = answer["usage"]["prompt_tokens_details"] or {}
        self.cached_tokens += details.get("cached_tokens", 0)
        text: str = answer["choices"][0]["text"]
        return text

    @contextmanager
    def asking(self) -> Generator[None]:
        self._end.clear()
        before = self.answered
        thread = threading.Thread(target=self._ask_on)
        thread.start()
        wait_for(lambda: self.answered > before, "an answer")
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _ask_on(self) -> None:
        while not self._end.is_set():
            for tokens in PROMPTS:
                self.ask(tokens)


def test_a_server_does_what_it_is_asked_under_load_and_one_started_anew_has_its_store(
    tmp_path: Path,
) -> None:
    model, socket, store = tmp_path / "model", tmp_path / "s", tmp_path / "kv"
    make_model(model)

    def command(what: str, **fields: Any) -> Any:
        return ask(socket, what, **fields)

    kept: dict[str, Any] = {"ranks": 2, "store": store.as_uri()}
    with served(model, tmp_path / "log", control=str(socket), **kept) as address:
        users = Users(address, model)
        alone = [users.ask(each) for each in PROMPTS]
        with users.asking():
            pinned = command("pin", name="p", tokens=PROMPTS[0])
            limited = command("limit", namespace="*", host_pages=1000)
            flushed = command("flush")
            command("detach")
            detached = command("list")["store"]
            command("attach", store=store.as_uri())
            listed = command("list")
            command("log-level", level="info")
            steps = command("stats")["steps"]
        # The engine keeps stepping until no write to the store is in flight.
        wait_for(lambda: command("stats")["in_flight"] == {}, "an idle engine")
        with pytest.raises(LockstepError, match="queued: the engine is idle"):
            command("unpin", name="p")
        again = [users.ask(each) for each in PROMPTS]
        with users.asking():
            unpinned = command("list")["pins"]

    with served(model, tmp_path / "restarted", **kept) as address:
        others = Users(address, model)
        restarted = [others.ask(each) for each in PROMPTS]

    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert again == restarted == alone
    assert (
        others.cached_tokens
        == sum((len(each) - 1) // BLOCK_TOKENS for each in PROMPTS) * BLOCK_TOKENS
    )
    # The scheduler and both workers log the changed level, in vLLM's format.
    assert len(re.findall(r"\(\w+ pid=\d+\) INFO [\d-]+ [\d:]+ .* logs from info on", log)) == 3
    assert (limited, flushed["unwritten"]) == ({"is_known": True}, {})
    assert pinned["tokens"] > 0
    assert (listed["pins"]["p"]["tokens"], unpinned) == (pinned["tokens"], {})
    assert (listed["store"], detached) == ("attached", "detached")
    assert steps > 0
    assert [each for each in store.rglob("*") if each.is_file()]
