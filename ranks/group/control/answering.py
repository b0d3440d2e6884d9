"""Answers to what was asked by way of rank 0: what every rank has done, or why not."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Final, cast

from ....errors import LockstepError, MessageError, UsageError
from .group_control import GroupControl
from .requests import Answer, Attach, ControlRequest, Detach, Flush, request_of

AGREED_S: Final = 10.0
"""How long an answer is waited for. What the engine's steps bring comes much sooner."""
POLL_S: Final = 0.01
_STATS: Final = {"ask": "stats"}

Submit = Callable[[bytes], Future[int]]
"""Puts a message into the group's inbox (`LeadingInbox.submit`)."""


class Answering:
    """Has a group do what is asked. For rank 0, and for any thread but the engine's."""

    def __init__(
        self,
        control: GroupControl,
        submit: Submit,
        *,
        refused: tuple[str, ...] = (),
        agreed_s: float = AGREED_S,
    ) -> None:
        """`refused` are the requests that the group does not take."""
        self._control = control
        self._submit = submit
        self._agreed_s = agreed_s
        self._refused = refused

    def answer(self, asked: object) -> Answer:
        """Return what became of a request, given as JSON has it.

        Raises `LockstepError`, by its type and with the words for whoever asked.
        """
        if asked == _STATS:
            return asdict(self._control.cache.stats(rounds=0))
        request = request_of(asked)
        if request.ask in self._refused:
            raise UsageError(
                f"{request.ask} is not for this group: its engine decides on that itself"
            )
        if isinstance(request, Flush):
            return self._flushed(request)
        return self._agreed(request)

    def _agreed(self, request: ControlRequest) -> Answer:
        """Return what became of a request on every rank."""
        message, answer = self._control.waited_for(request)
        opens = isinstance(request, Attach | Detach)
        longer_s = self._control.cache.config.timeouts.open_s if opens else 0.0
        try:
            self._submit(message).result(self._agreed_s)
            return answer.result(self._agreed_s + longer_s)
        except MessageError as error:
            raise UsageError(f"the group's inbox refuses it: {error}") from error
        except TimeoutError:
            raise LockstepError(
                "the ranks have not agreed on it yet: the engine takes no steps now, or a rank hangs."
                " It is done with their next step"
            ) from None
        finally:
            # Where nobody has begun it, nobody is told any more.
            answer.cancel()

    def _flushed(self, request: Flush) -> Answer:
        """Wait until what is on its way to host memory and to the store is there.

        Twice: what is copied to host memory is written to the store by operations that begin then.
        """
        ends = time.monotonic() + self._control.cache.config.timeouts.flush_s
        operations: set[int] = set()
        for _ in range(2):
            in_flight = cast("list[int]", self._agreed(request)["in_flight"])
            operations.update(in_flight)
            self._wait_for(in_flight, ends)
        return {"operations": len(operations)}

    def _wait_for(self, operations: list[int], ends: float) -> None:
        """Wait until operations have ended, whose ids are never used again."""
        in_flight = self._control.cache.inspection.in_flight
        while left := [each for each in operations if each in in_flight]:
            if time.monotonic() > ends:
                raise LockstepError(
                    f"{len(left)} of {len(operations)} operations are still in flight after"
                    f" {self._control.cache.config.timeouts.flush_s:g} s"
                )
            time.sleep(POLL_S)
