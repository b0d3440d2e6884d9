"""The bound on bytes that a rank reads from stores and writes to them at a time (rule R10)."""

import asyncio
import threading
from collections import deque


class _Turn:
    """A caller that waits for room, on the event loop in which it has called."""

    def __init__(self, share: int) -> None:
        self.share = share
        self.granted = False
        self.given_up = False
        self.loop = asyncio.get_running_loop()
        self.come = self.loop.create_future()

    def wake(self) -> None:
        """Let the caller go on; called on its own loop."""
        if not self.come.done():
            self.come.set_result(None)


class InflightBytes:
    """Lets bytes be taken up to a bound, first come first served. Thread-safe.

    All stores of a rank take from one, each from its own event loop: also those that were let go of
    and whose last calls have not returned. Each operation asks for one batch at a time, so that
    operations take turns when there is no room for all, and a large one neither starves the others
    nor is starved by them.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self.taken = 0
        """The bytes that are taken now."""
        self._waiting: deque[_Turn] = deque()

    async def take(self, nbytes: int) -> int:
        """Wait for room and return how much was taken, to be given back.

        That is `nbytes`, or all the room there is if it is less: one page that is larger than the
        bound goes alone.
        """
        share = min(nbytes, self.bytes_max)
        with self._lock:
            if not self._waiting and self.taken + share <= self.bytes_max:
                self.taken += share
                return share
            turn = _Turn(share)
            self._waiting.append(turn)
        try:
            await turn.come
        except asyncio.CancelledError:
            with self._lock:
                turn.given_up = True
                if turn.granted:
                    self.taken -= share
                # Those behind may fit into the room that this one was too large for.
                self._grant()
            raise
        return share

    def give_back(self, share: int) -> None:
        """Give back what `take` returned."""
        with self._lock:
            self.taken -= share
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            turn = self._waiting[0]
            if not turn.given_up:
                if self.taken + turn.share > self.bytes_max:
                    return
                self.taken += turn.share
                turn.granted = True
                # A loop ends only after whoever waits in it was cancelled, and so has given up.
                turn.loop.call_soon_threadsafe(turn.wake)
            self._waiting.popleft()
