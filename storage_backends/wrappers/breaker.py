"""`breaker+...`: a store that fails call after call is left alone for a while.

    breaker.calls=5         this many failed calls in a row open the breaker (1 to 1000)
    breaker.cool_down_s=5   how long it stays open before the store is tried again (0.001 to 3600)

What a call says about the store:

    it failed          a read or write all of whose keys FAILED or TIMED_OUT; a removal that freed no
                       name; an existence call that came back only at its deadline, without one yes
    the store answers  a read or write with any other outcome; a removal that freed a name
    nothing            any other existence call (a backend may answer from memory); a call without
                       keys, or whose deadline had passed when it came; one that was cancelled; one
                       all of whose keys fail by the caller's own fault: names that cannot be, and
                       buffers that do not fit

While the breaker is open, reads and writes are FAILED at once, and existence and removal False. After
the cool-down one call at a time is let through: if it fails, the breaker stays open for another
cool-down; if the store answers, it closes; a call that says nothing leaves that to the next.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ...page_format.object_name import ObjectName, name_digest
from ..base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ..fitting import fitting
from ..uri import StoreUri
from .base import Wrapper

CALLS: Final = 5
COOL_DOWN_S: Final = 5.0


class BreakerState(StrEnum):
    """Whether calls get through."""

    CLOSED = "closed"
    """They do."""
    OPEN = "open"
    """They are answered at once."""
    HALF_OPEN = "half_open"
    """One at a time does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStatus:
    """The state of a breaker, and what it did since it was made."""

    state: BreakerState
    opened: int
    """How often it opened, or stayed open after a trial."""
    refused: int
    """Calls that it answered in the store's place."""


class _Call:
    """One call that was let through, and what it turned out to say about the store."""

    def __init__(self, era: int) -> None:
        self.era = era
        self.answered: bool | None = None


class BreakerBackend(Wrapper):
    """Answers in the place of a store that has failed `calls` times in a row."""

    def __init__(
        self,
        backend: StorageBackend,
        *,
        calls: int = CALLS,
        cool_down_s: float = COOL_DOWN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(backend)
        self._calls = calls
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._failed_in_a_row = 0
        self._opened_at: float | None = None
        self._trying = False
        # What a call says that began before the breaker opened last is no news.
        self._era = 0
        self._refused = 0

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`; False while the breaker is open."""
        with self._let_through(len(names), deadline) as call:
            if call is None:
                return [False] * len(names)
            found = await self._behind.exists(names, deadline=deadline)
            if self._clock() >= deadline and not any(found):
                call.answered = False
            return found

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """See `StorageBackend`; FAILED while the breaker is open."""
        with self._let_through(len(reads), deadline) as call:
            if call is None:
                return [ReadOutcome.FAILED] * len(reads)
            outcomes = await self._behind.read(reads, deadline=deadline)
            failed = (ReadOutcome.FAILED, ReadOutcome.TIMED_OUT)
            if any(outcome not in failed for outcome in outcomes):
                call.answered = True
            elif any(_is_sound(read, writable=True) for read in reads):
                call.answered = False
            return outcomes

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """See `StorageBackend`; FAILED while the breaker is open."""
        with self._let_through(len(writes), deadline) as call:
            if call is None:
                return [WriteOutcome.FAILED] * len(writes)
            outcomes = await self._behind.write(writes, deadline=deadline)
            failed = (WriteOutcome.FAILED, WriteOutcome.TIMED_OUT)
            if any(outcome not in failed for outcome in outcomes):
                call.answered = True
            elif any(_is_sound(write, writable=False) for write in writes):
                call.answered = False
            return outcomes

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`; False while the breaker is open."""
        with self._let_through(len(names), deadline) as call:
            if call is None:
                return [False] * len(names)
            freed = await self._behind.remove(names, deadline=deadline)
            if any(freed):
                call.answered = True
            elif any(name_digest(name) is not None for name in names):
                call.answered = False
            return freed

    def status(self) -> BreakerStatus:
        """Return whether calls get through, and what was done so far."""
        return BreakerStatus(state=self._state(), opened=self._era, refused=self._refused)

    def _state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        if self._clock() < self._opened_at + self._cool_down_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    @contextmanager
    def _let_through(self, keys: int, deadline: float) -> Generator[_Call | None]:
        """Give the call to be filled in, or None if it is refused; then draw the conclusion."""
        if not keys or self._clock() >= deadline:
            yield _Call(self._era)
            return
        state = self._state()
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._trying):
            self._refused += 1
            yield None
            return
        call = _Call(self._era)
        self._trying = state is BreakerState.HALF_OPEN
        try:
            yield call
        finally:
            if call.era == self._era:
                self._conclude(call.answered)

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


def _is_sound(wish: Read | Write, *, writable: bool) -> bool:
    """Say whether a store can do what is asked for at all."""
    fits = fitting(wish.buffers, wish.shape.nbytes, writable=writable) is not None
    return fits and name_digest(wish.name) is not None


def wrap(uri: StoreUri, backend: StorageBackend) -> BreakerBackend:
    """Return `backend` with the breaker that the URI's options ask for."""
    uri.only_wrapper_options("breaker", ("breaker.calls", "breaker.cool_down_s"))
    return BreakerBackend(
        backend,
        calls=uri.number("breaker.calls", CALLS, low=1, high=1000),
        cool_down_s=uri.decimal("breaker.cool_down_s", COOL_DOWN_S, low=0.001, high=3600),
    )
