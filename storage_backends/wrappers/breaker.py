"""`breaker+...`: a circuit breaker that skips a store after several failed calls in a row.

    breaker.calls=5         this many failed calls in a row open the breaker (1 to 1000)
    breaker.cool_down_s=5   seconds from opening until the store is tried again (0.001 to 3600)

How a call counts:

    failure   a read or write whose keys all FAILED or TIMED_OUT; a removal that freed no name; an
              existence call that returned only at its deadline, without one positive answer
    success   a read or write with any other outcome; a removal that freed a name
    neither   any other existence call (a backend may answer from memory); a call without keys, or
              whose deadline had passed before it began; a cancelled call; a call all of whose keys fail
              by the caller's own fault: impossible names, and buffers that do not fit

While the breaker is open, every read and write is FAILED at once, and every existence call and removal
returns False. After the cool-down one call at a time is forwarded. A failure starts another cool-down,
and a success closes the breaker. If that call counts as neither, the next call decides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from ...coordinator.validated_settings import Settings
from ...page_format.object_name import ObjectName, name_digest
from ..base import Read, StorageBackend, Write
from ..buffers import fitting
from ..uri import StoreUri
from .base import Answer, AroundWrapper, Call, PendingCall


@dataclass(frozen=True, kw_only=True)
class BreakerOptions(Settings):
    """The options of `breaker+`."""

    calls: Annotated[int, Meta(ge=1, le=1000)] = 5
    cool_down_s: Annotated[float, Meta(ge=0.001, le=3600)] = 5.0


class BreakerState(StrEnum):
    """The state of a circuit breaker, which decides whether calls are forwarded."""

    CLOSED = "closed"
    """The breaker is closed: calls are forwarded to the store."""
    OPEN = "open"
    """The breaker is open: calls fail at once without reaching the store."""
    HALF_OPEN = "half_open"
    """The cool-down is over: one call at a time is forwarded."""


class BreakerBackend(AroundWrapper):
    """A wrapper that fails calls at once after the store has failed `calls` times in a row."""

    def __init__(
        self,
        backend: StorageBackend,
        *,
        calls: int = BreakerOptions.calls,
        cool_down_s: float = BreakerOptions.cool_down_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(backend)
        self._calls = calls
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._failed_in_a_row = 0
        self._opened_at: float | None = None
        self._trying = False
        # Number of times that the breaker has opened. The result of a call is ignored if the breaker
        # has opened since the call began.
        self._era = 0

    def state(self) -> BreakerState:
        """Return the state of the breaker now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        if self._clock() < self._opened_at + self._cool_down_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    async def _around(self, call: PendingCall[Answer]) -> list[Answer]:
        if not call.keys or self._clock() >= call.deadline:
            return await call.ask()
        state = self.state()
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._trying):
            return [call.failed] * len(call.keys)
        era, self._trying = self._era, state is BreakerState.HALF_OPEN
        answered: bool | None = None
        try:
            answers = await call.ask()
            answered = self._answered(call, answers)
            return answers
        finally:
            if era == self._era:
                self._conclude(answered)

    def _answered(self, call: PendingCall[Answer], answers: Sequence[Answer]) -> bool | None:
        """Return True if the call counts as a success, False if as a failure, None if as neither."""
        some = any(answer not in (call.failed, call.late) for answer in answers)
        if call.kind is Call.EXISTS:
            return False if self._clock() >= call.deadline and not some else None
        if some:
            return True
        return False if any(map(_is_possible, call.keys)) else None

    def _conclude(self, answered: bool | None) -> None:
        trying, self._trying = self._trying, False
        if answered is None:
            return
        if answered:
            self._failed_in_a_row = 0
            self._opened_at = None
            return
        self._failed_in_a_row += 1
        if trying or self._failed_in_a_row >= self._calls:
            self._opened_at = self._clock()
            self._era += 1


def _is_possible(key: ObjectName | Read | Write) -> bool:
    """Return whether the key can succeed: its name is valid and its buffers have the right size."""
    if isinstance(key, ObjectName):
        return name_digest(key) is not None
    fits = fitting(key.buffers, key.shape.nbytes, writable=isinstance(key, Read)) is not None
    return fits and name_digest(key.name) is not None


def wrap(uri: StoreUri, backend: StorageBackend) -> BreakerBackend:
    """Return `backend` wrapped in a circuit breaker with the options of the URI."""
    options = uri.read(BreakerOptions, "breaker")
    return BreakerBackend(backend, calls=options.calls, cool_down_s=options.cool_down_s)
