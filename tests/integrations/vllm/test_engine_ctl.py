"""What an operator asks of `vllm serve -tp 2`, whose one scheduler decides for both workers."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep import LockstepError, ask
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.pd_proxy import ask as complete
from tests.kit.vllm.served import make_model, served
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = [list(each.tokens) for each in mixed_prompts(12)]


class Users:
    """Ask a server again and again for what the prompts go on with."""

    def __init__(self, address: str, model: Path) -> None:
        self._address = address
        self._asked = {"model": str(model), "max_tokens": 8, "temperature": 0}
        self._end = threading.Event()
        self.answered = 0

    def ask(self, tokens: list[int]) -> str:
        """Ask once."""
        answer = complete(self._address, self._asked | {"prompt": tokens})
        self.answered += 1
        text: str = answer["choices"][0]["text"]
        return text

    @contextmanager
    def asking(self) -> Generator[None]:
        """Ask while in here."""
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


def test_a_server_does_what_it_is_asked_under_load_and_queues_it_while_it_is_idle(
    tmp_path: Path,
) -> None:
    model, socket, store = tmp_path / "model", tmp_path / "s", tmp_path / "kv"
    make_model(model)

    def asked(what: str, **fields: Any) -> Any:
        return ask(socket, what, **fields)

    with served(model, tmp_path / "log", ranks=2, control=str(socket)) as address:
        users = Users(address, model)
        alone = [users.ask(each) for each in PROMPTS]
        with users.asking():
            pinned = asked("pin", name="p", tokens=PROMPTS[0])
            limited = asked("limit", namespace="*", host_pages=1000)
            asked("attach", store=store.as_uri())
            flushed = asked("flush")
            listed = asked("list")
            asked("log-level", level="info")
            asked("detach")
            detached = asked("list")["store"]
            steps = asked("stats")["steps"]
        with pytest.raises(LockstepError, match="queued: the engine computes nothing now"):
            asked("unpin", name="p")
        idle = asked("stats")["in_flight"]
        again = [users.ask(each) for each in PROMPTS]
        with users.asking():
            unpinned = asked("list")["pins"]

    said = (tmp_path / "log").read_text(encoding="utf-8")
    assert again == alone
    # The scheduler and both workers.
    assert said.count("logs from info on") == 3
    assert (limited, flushed["unwritten"], idle) == ({"is_known": True}, {}, {})
    assert pinned["tokens"] > 0
    assert (listed["pins"]["p"]["tokens"], unpinned) == (pinned["tokens"], {})
    assert (listed["store"], detached) == ("attached", "detached")
    assert steps > 0
    assert [each for each in store.rglob("*") if each.is_file()]
