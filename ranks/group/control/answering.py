"""Answers to what was asked by way of rank 0: what every rank has done, or why not."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Final, cast

from ....errors import LockstepError, UsageError
from ...replica.tree.backlog import Undone
from .group_control import GroupControl
from .requests import Answer, AnyRequest, Attach, Detach, Flush, request_of

AGREED_S: Final = 10.0
"""How long an answer is waited for. What the engine's steps bring comes much sooner."""
IDLE_S: Final = 1.0
"""An engine that has taken no step for so long has nothing to compute."""
POLL_S: Final = 0.01
_STATS: Final = {"ask": "stats"}

Submit = Callable[[bytes], int]
"""Gives the ranks a request, and returns its number (`StoredRequests.submit`)."""


class Answering:
    """Has a group do what is asked. For rank 0, and for any thread but the engine's."""

    def __init__(
        self,
        control: GroupControl,
        submit: Submit,
        *,
        refused: tuple[str, ...] = (),
        agreed_s: float = AGREED_S,
        idle_s: float = IDLE_S,
    ) -> None:
        """`refused` are the requests that the group does not take."""
        self._control = control
        self._submit = submit
        self._agreed_s = agreed_s
        self._idle_s = idle_s
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

    def _agreed(self, request: AnyRequest) -> Answer:
        """Return what became of a request on every rank."""
        content, answer = self._control.waited_for(request)
        opens = isinstance(request, Attach | Detach)
        longer_s = self._control.cache.config.timeouts.open_s if opens else 0.0
        ends = time.monotonic() + self._agreed_s + longer_s
        try:
            self._submit(content)
            inspection = self._control.cache.inspection
            while time.monotonic() < ends:
                before = inspection.rounds
                with suppress(TimeoutError):
                    return answer.result(self._idle_s)
                if inspection.ended_by is not None:
                    raise LockstepError(f"the group has ended: {inspection.ended_by}")
                if inspection.rounds == before and not len(inspection.requests):
                    raise LockstepError(
                        "queued: the engine computes nothing now, and carries it out with its next"
                        " request"
                    )
            raise LockstepError(
                "the ranks have not agreed on it yet; they carry it out with their next step, unless"
                " one of them hangs, or cannot read it and says why in its log"
            )
        finally:
            # Where nobody has begun it, nobody is told any more.
            answer.cancel()

    def _flushed(self, request: Flush) -> Answer:
        """Wait until what is on its way to host memory and to the store is there.

        Twice: what is copied to host memory is written to the store by operations that begin then. And
        until the store has what was cached before it was attached, of which few are written at a time.
        """
        ends = time.monotonic() + self._control.cache.config.timeouts.flush_s
        operations: set[int] = set()
        waits, told = 2, self._agreed(request)
        while waits or (_writes_older(told) and time.monotonic() < ends):
            in_flight = cast("list[int]", told["in_flight"])
            operations.update(in_flight)
            self._wait_for(in_flight, ends)
            waits, told = max(0, waits - 1), self._agreed(request)
        return {"operations": len(operations), "unwritten": told["unwritten"]}

    def _wait_for(self, operations: list[int], ends: float) -> None:
        """Wait until operations have ended, whose ids are never used again."""
        works = self._control.cache.inspection.works
        while left := [each for each in operations if works(each)]:
            if time.monotonic() > ends:
                raise LockstepError(
                    f"{len(left)} of {len(operations)} operations are still in flight after"
                    f" {self._control.cache.config.timeouts.flush_s:g} s"
                )
            time.sleep(POLL_S)


def _writes_older(told: Answer) -> bool:
    """Say whether pages from before the store was attached are still on their way."""
    return bool(told["in_flight"]) and Undone.NEW_STORE in cast("dict[str, int]", told["unwritten"])
