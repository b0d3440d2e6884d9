"""`limit+...`: a bound on what is asked of a store at a time.

    limit.calls=16           calls in flight (1 to 65536)
    limit.bytes=268435456    bytes that they read and write (1 to 2^50)

Calls are let in first come first served: one that is too large for the room there is holds up those
behind it, and so is never starved by smaller ones. A call of more bytes than the bound goes alone.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from ...page_format.object_name import ObjectName
from ..base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ..uri import StoreUri
from .base import Wrapper

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


class LimitBackend(Wrapper):
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

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`."""
        async with self._let_in(len(names), 0, deadline) as is_in:
            if not is_in:
                return [False] * len(names)
            return await self._behind.exists(names, deadline=deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """See `StorageBackend`."""
        nbytes = sum(read.shape.nbytes for read in reads)
        async with self._let_in(len(reads), nbytes, deadline) as is_in:
            if not is_in:
                return [ReadOutcome.TIMED_OUT] * len(reads)
            return await self._behind.read(reads, deadline=deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """See `StorageBackend`."""
        nbytes = sum(write.shape.nbytes for write in writes)
        async with self._let_in(len(writes), nbytes, deadline) as is_in:
            if not is_in:
                return [WriteOutcome.TIMED_OUT] * len(writes)
            return await self._behind.write(writes, deadline=deadline)

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`."""
        async with self._let_in(len(names), 0, deadline) as is_in:
            if not is_in:
                return [False] * len(names)
            return await self._behind.remove(names, deadline=deadline)

    def in_flight(self) -> InFlight:
        """Return what is let through now."""
        return InFlight(
            calls=self._room.calls,
            nbytes=self._room.nbytes,
            waiting=self._room.waiting,
            turned_away=self._turned_away,
        )

    @asynccontextmanager
    async def _let_in(self, keys: int, nbytes: int, deadline: float) -> AsyncGenerator[bool]:
        """Wait for room, and say whether there was any in time."""
        if not keys:
            yield True
            return
        taken = await self._take_in_time(nbytes, deadline)
        if taken is None:
            self._turned_away += 1
            yield False
            return
        try:
            yield True
        finally:
            self._room.give(taken)

    async def _take_in_time(self, nbytes: int, deadline: float) -> int | None:
        try:
            async with asyncio.timeout(deadline - self._clock()):
                return await self._room.take(nbytes)
        except TimeoutError:
            return None


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

    async def take(self, nbytes: int) -> int:
        """Wait for room for one call, and return the bytes that it took, to be given back.

        That is `nbytes`, or all the room there is if that is less. Nothing is taken if the wait is
        cancelled.
        """
        share = min(nbytes, self._nbytes_max)
        if not self._queue and self._fits(share):
            self._enter(share)
            return share
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((share, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                # Those behind may fit into the room that this one was too large for.
                self._let_in()
            else:
                # The turn came in the very moment that the wait ended.
                self.give(share)
            raise
        return share

    def give(self, share: int) -> None:
        """Give back what `take` returned."""
        self.calls -= 1
        self.nbytes -= share
        self._let_in()

    def _enter(self, share: int) -> None:
        self.calls += 1
        self.nbytes += share

    def _fits(self, share: int) -> bool:
        return self.calls < self._calls_max and self.nbytes + share <= self._nbytes_max

    def _let_in(self) -> None:
        while self._queue:
            share, turn = self._queue[0]
            if not turn.done():
                if not self._fits(share):
                    return
                self._enter(share)
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
