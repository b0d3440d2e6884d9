"""vLLM with Lockstep says what it says without, whatever an operator asks of its group meanwhile."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import LockstepError, UsageError, ask
from tests.kit.vllm.group import Group, assert_exact, lockstep_connector
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Output, Phase, Plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()


class Operator:
    """Asks a group for one thing after the other, from when it listens until it has ended."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.answers: list[Any] = []
        self.refused: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def end(self) -> None:
        """Ask for nothing more."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(0.1):
            if self.socket.is_socket():
                self._ask("drop", namespace=None)
                self._ask("limit", namespace="*", host_pages=20 + len(self.answers) % 40)
                self._ask("weights", version="2")

    def _ask(self, what: str, **asked: Any) -> None:
        try:
            self.answers.append(ask(self.socket, what, timeout_s=10.0, **asked))
        except UsageError as error:
            self.refused.append(str(error))
        except LockstepError:
            # It begins, stands still or ends just now.
            return


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    made = Operator(tmp_path / "s")
    yield made
    made.end()


def test_what_an_operator_asks_of_an_engine_s_group_changes_no_output(
    group: Group, reference: list[Output], operator: Operator
) -> None:
    connector = lockstep_connector("memory://", control=str(operator.socket))
    phases = [Phase(PROMPTS, name) for name in ("cold", "second", "third")]

    ranks = group.run(Plan(model=group.model, phases=phases, connector=connector))

    assert_exact(reference, ranks)
    assert max(each.get("pages", 0) for each in operator.answers) > 0
    assert {*operator.refused} == {
        "weights is not for this group: its engine decides on that itself"
    }
