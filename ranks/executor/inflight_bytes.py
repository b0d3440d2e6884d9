"""The bound on bytes that the storage loop reads and writes at a time (rule R10)."""

import asyncio
from collections import deque


class InflightBytes:
    """Hands out room for bytes, first come first served. Used from one event loop.

    Each operation asks for one batch at a time, so that operations take turns when there is no room
    for all, and a large one neither starves the others nor is starved by them.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        """The bytes that are taken now."""
        return self._taken

    async def take(self, nbytes: int) -> int:
        """Wait for room and return how much was taken, to be given back.

        That is `nbytes`, or all the room there is if it is less: one page that is larger than the
        bound goes alone.
        """
        share = min(nbytes, self._bytes_max)
        if not self._waiting and self._taken + share <= self._bytes_max:
            self._taken += share
            return share
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(share)
            else:
                # Those behind may fit into the room that this one was too large for.
                self._grant()
            raise
        return share

    def give(self, share: int) -> None:
        """Give back what `take` returned."""
        self._taken -= share
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            share, turn = self._waiting[0]
            if not turn.done():
                if self._taken + share > self._bytes_max:
                    return
                self._taken += share
                turn.set_result(None)
            self._waiting.popleft()
