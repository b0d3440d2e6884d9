"""`limit+...`: a bound on what is asked of a store at a time.

    limit.calls=16           calls in flight (1 to 65536)
    limit.bytes=268435456    bytes that they read and write (1 to 2^50)

Calls are let in first come first served: one that is too large for the room there is holds up those
behind it, and so is never starved by smaller ones. A call of more bytes than the bound goes alone.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..base import StorageBackend
from ..uri import StoreUri
from .around import Answer, AroundWrapper, PendingCall

CALLS: Final = 16
BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What a limit lets through now, and what it turned away since it was made."""

    calls: int
    nbytes: int
    waiting: int
    """Calls that wait for room."""
    turned_away: int
    """Calls that had none by their deadline."""


class LimitBackend(AroundWrapper):
    """Lets at most so many calls and bytes through at a time; the rest wait, up to their deadlines.

    A call whose deadline comes while it waits is TIMED_OUT (False for existence and removal) and
    has asked nothing of the store; so also one that is cancelled while it waits.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        calls: int = CALLS,
        nbytes: int = BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(backend)
        self._room = _Room(calls, nbytes)
        self._clock = clock
        self._turned_away = 0

    def in_flight(self) -> InFlight:
        """Return what is let through now."""
        return InFlight(
            calls=self._room.calls,
            nbytes=self._room.nbytes,
            waiting=self._room.waiting,
            turned_away=self._turned_away,
        )

    async def _around(self, call: PendingCall[Answer]) -> list[Answer]:
        if not call.keys:
            return await call.ask()
        try:
            async with asyncio.timeout(call.deadline - self._clock()):
                share = await self._room.enter(sum(call.sizes))
        except TimeoutError:
            self._turned_away += 1
            return [call.late] * len(call.keys)
        try:
            return await call.ask()
        finally:
            self._room.leave(share)


class _Room:
    """Room for so many calls and bytes, first come first served. Used from one event loop."""

    def __init__(self, calls_max: int, nbytes_max: int) -> None:
        self._calls_max = calls_max
        self._nbytes_max = nbytes_max
        self.calls = 0
        self.nbytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(not turn.done() for _, turn in self._queue)

    async def enter(self, nbytes: int) -> int:
        """Wait for room for one call of so many bytes, and return its share of them for `leave`.

        That is `nbytes`, or all that there is room for if that is less. A wait that is cancelled
        leaves the room as it was.
        """
        share = min(nbytes, self._nbytes_max)
        if not self._queue and self._fits(share):
            self._occupy(share)
            return share
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((share, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                # Those behind may fit into the room that this one was too large for.
                self._admit_waiting()
            else:
                # The turn came in the very moment that the wait ended.
                self.leave(share)
            raise
        return share

    def leave(self, share: int) -> None:
        """Give back the room of a call; `share` is what `enter` returned."""
        self.calls -= 1
        self.nbytes -= share
        self._admit_waiting()

    def _occupy(self, share: int) -> None:
        self.calls += 1
        self.nbytes += share

    def _fits(self, share: int) -> bool:
        return self.calls < self._calls_max and self.nbytes + share <= self._nbytes_max

    def _admit_waiting(self) -> None:
        while self._queue:
            share, turn = self._queue[0]
            if not turn.done():
                if not self._fits(share):
                    return
                self._occupy(share)
                turn.set_result(None)
            self._queue.popleft()


def wrap(uri: StoreUri, backend: StorageBackend) -> LimitBackend:
    """Return `backend` with the bounds that the URI's options ask for."""
    uri.only_wrapper_options("limit", ("limit.calls", "limit.bytes"))
    return LimitBackend(
        backend,
        calls=uri.number("limit.calls", CALLS, low=1, high=1 << 16),
        nbytes=uri.number("limit.bytes", BYTES, low=1, high=1 << 50),
    )
