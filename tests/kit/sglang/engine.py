"""Starts a real SGLang in a separate process and sends commands to it."""

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from tests.kit.forks.processes import Place, end_group
from tests.kit.sglang.driver import POLLED_S, STARTED
from tests.kit.sglang.processes import environment as environment_on_a_cpu
from tests.kit.sglang.processes import start_forked
from tests.kit.sglang.requests import Answer, RankReport, Request

START_S = 150.0
ANSWER_S = 120.0
"""Seconds to wait for the result of a command."""
CLOSE_S = 30.0
LOG_TAIL = 6000

PLUGINS = ("lockstep", "lockstep_probe")

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "page_size": 16,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "chunked_prefill_size": 256,
    "disable_cuda_graph": True,
    "random_seed": 0,
    "log_level": "info",
}
"""Default arguments of `sglang.Engine`, chosen for a small engine with exact results.

SGLang's default attention backend is not used, because it needs sgl_kernel.
"""


class EngineEndedError(Exception):
    """The engine could not start, died, or did not answer in time; the message ends with its log."""


class CommandError(Exception):
    """A command failed and the engine still runs; the message is the traceback."""


class RunningEngine:
    """One SGLang engine with its ranks, running for the duration of a `with` block.

    `plugins` names the SGLang plug-ins to load, `faults` goes to the probe
    (`tests/kit/sglang/plugins/probe.py`), and `arguments` override `ARGUMENTS`. The processes are forks
    of a process that has imported SGLang. Their working folder is `folder`, which also gets their log.
    An engine that cannot start, dies, or does not answer in time is killed, and the call raises
    `EngineEndedError`. If a command fails, the call raises `CommandError` and the engine continues.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        tp: int = 2,
        plugins: Sequence[str] = PLUGINS,
        faults: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log_file = _unused(folder)
        self._tp = tp
        self._arguments = {"model_path": str(model), "tp_size": tp, **ARGUMENTS, **arguments}
        self._environment = {
            **os.environ,
            **environment_on_a_cpu(tp, plugins),
            "LOCKSTEP_PROBE": json.dumps(dict(faults or {})),
            **(environment or {}),
        }
        self._numbers = itertools.count(STARTED + 1)
        self._answers: dict[int, tuple[str | None, Any]] = {}
        self._leader: int | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        place = Place(folder=self.folder, log=self.log_file, environment=self._environment)
        self._leader, self._connection = start_forked(place)
        try:
            self._connection.send(self._arguments)
            self._answer_to(STARTED, START_S)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def generate(self, requests: Sequence[Request], *, together: bool = True) -> list[Answer]:
        """Send requests, all at once or each after the previous answer; return the answers."""
        answers: list[Answer] = self.ask("generate", requests=list(requests), together=together)
        return answers

    def flush(self) -> None:
        self.ask("flush", within_s=POLLED_S)

    def update_weights(self, path: Path) -> tuple[bool, str]:
        """Load weights; return whether every rank succeeded, and SGLang's message.

        SGLang first waits for the end of running requests.
        """
        answer: tuple[bool, str] = self.ask("update_weights", model_path=str(path))
        return answer

    def ranks(self) -> list[RankReport]:
        """Return the probe's counters of every rank, all taken in the same scheduler iteration."""
        self.ask("rpc", method="lockstep_probe", keywords={"folder": str(self.folder)})
        paths = [self.folder / f"rank{rank}.json" for rank in range(self._tp)]
        return [RankReport(**json.loads(path.read_text())) for path in paths]

    def shutdown(self) -> list[int]:
        """Shut down the ranks, which close their caches; return the processes that had to be killed."""
        stuck: list[int] = self.ask("shutdown", within_s=CLOSE_S)
        self.kill()
        return stuck

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def ask(self, command: str, **keywords: Any) -> Any:
        """Run a command of `driver.Driver` and return its result."""
        return self._answer_to(self._tell(command, keywords), ANSWER_S)

    def _answer_to(self, number: int, deadline_s: float) -> Any:
        """Wait for the result of the command with this number."""
        ends = time.monotonic() + deadline_s
        while number not in self._answers:
            self._take_answer(ends, f"no answer in {deadline_s:g} s")
        failed, value = self._answers.pop(number)
        if failed is not None and number == STARTED:
            raise EngineEndedError(f"the engine did not start:\n{failed}\n{self._tail()}")
        if failed is not None:
            raise CommandError(failed)
        return value

    def kill(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._leader is not None:
            end_group(self._leader)
            self._leader = None

    def _tell(self, command: str, keywords: dict[str, Any]) -> int:
        assert self._connection is not None
        number = next(self._numbers)
        try:
            self._connection.send((number, command, keywords))
        except OSError:
            self._end("it is gone")
        return number

    def _take_answer(self, ends: float, too_late: str) -> None:
        assert self._connection is not None
        try:
            if not self._connection.poll(max(0.0, ends - time.monotonic())):
                self._end(too_late)
            number, failed, value = self._connection.recv()
        except (EOFError, OSError):
            self._end("it died")
        self._answers[number] = failed, value

    def _end(self, why: str) -> NoReturn:
        self.kill()
        raise EngineEndedError(f"{why}; the log ends with\n{self._tail()}") from None

    def _tail(self) -> str:
        return self.log()[-LOG_TAIL:]


def _unused(folder: Path) -> Path:
    names = (folder / f"engine{number}.log" for number in itertools.count(1))
    return next(path for path in names if not path.exists())
