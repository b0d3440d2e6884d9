"""Answers control requests on rank 0, with the result agreed by every rank or with an error."""

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
"""Default timeout in seconds for the execution of a control request by every rank. The execution takes
much less time while the engine keeps stepping."""
IDLE_S: Final = 1.0
"""Seconds without an engine step after which an engine that has no requests is considered idle. The
client then gets an error that says that its control request is queued."""
POLL_S: Final = 0.01
_STATS: Final = {"ask": "stats"}

Submit = Callable[[bytes], int]
"""Function that submits an encoded control request to the ranks and returns its number
(`StoredRequests.submit`)."""


class ControlReplies:
    """Submits control requests on rank 0 and waits for their results.

    For any thread except the engine's, which would wait for itself.
    """

    def __init__(
        self,
        control: GroupControl,
        submit: Submit,
        *,
        refused: tuple[str, ...] = (),
        agreed_s: float = AGREED_S,
        idle_s: float = IDLE_S,
    ) -> None:
        """`refused` names the kinds of control requests that this group rejects."""
        self._control = control
        self._submit = submit
        self._agreed_s = agreed_s
        self._idle_s = idle_s
        self._refused = refused

    def answer(self, parsed: object) -> Answer:
        """Execute a control request, given as parsed JSON, and return its result.

        Raises a `LockstepError` whose type and text are sent to the client.
        """
        if parsed == _STATS:
            return asdict(self._control.cache.stats(rounds=0))
        request = request_of(parsed)
        if request.ask in self._refused:
            raise UsageError(
                f"{request.ask} is refused: this group's engine decides on that itself"
            )
        if isinstance(request, Flush):
            return self._flushed(request)
        return self._agreed(request)

    def _agreed(self, request: AnyRequest) -> Answer:
        """Submit a control request; return the result once every rank has executed it."""
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
                        "queued: the engine is idle and executes this when it computes its next"
                        " request"
                    )
            raise LockstepError(
                "the ranks have not agreed on the request yet; they execute it in their next step,"
                " unless a rank hangs or cannot read the request (see its log)"
            )
        finally:
            # After a timeout no client waits for the result, so cancel its future. If this rank is
            # executing the control request, `cancel` has no effect.
            answer.cancel()

    def _flushed(self, request: Flush) -> Answer:
        """Retry backups and persists, and wait until they have finished.

        Returns the number of operations, and the numbers of unwritten pages by cause. The call waits
        twice: first for the operations in flight, then for the writes to the store, which start when
        backups finish. Pages cached before the store was attached are written a few at a time, so the
        wait is repeated until they are written, too.
        """
        ends = time.monotonic() + self._control.cache.config.timeouts.flush_s
        operations: set[int] = set()
        waits, reply = 2, self._agreed(request)
        while waits or (_writes_older(reply) and time.monotonic() < ends):
            in_flight = cast("list[int]", reply["in_flight"])
            operations.update(in_flight)
            self._wait_for(in_flight, ends)
            waits, reply = max(0, waits - 1), self._agreed(request)
        return {"operations": len(operations), "unwritten": reply["unwritten"]}

    def _wait_for(self, operations: list[int], ends: float) -> None:
        """Wait until the operations with these ids have finished. Ids are never reused."""
        works = self._control.cache.inspection.works
        while left := [each for each in operations if works(each)]:
            if time.monotonic() > ends:
                raise LockstepError(
                    f"{len(left)} of {len(operations)} operations are still in flight after"
                    f" {self._control.cache.config.timeouts.flush_s:g} s"
                )
            time.sleep(POLL_S)


def _writes_older(reply: Answer) -> bool:
    """Return whether pages cached before the store was attached are still being persisted."""
    return bool(reply["in_flight"]) and Undone.NEW_STORE in cast(
        "dict[str, int]", reply["unwritten"]
    )
