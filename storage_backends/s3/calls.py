"""Batched asynchronous work with the deadlines and the care of S2 and S3, for clients that can cancel.

At the deadline, when the call is cancelled and when the store is closed, what a call still does is
cancelled and has ended when the call returns. So nothing of it touches the caller's buffers later, as
long as whatever works outside of the event loop has memory of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine


class DeadlineCalls:
    """The calls of one store, from one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def run(self, work: Coroutine[None, None, None], deadline: float) -> None:
        """Do the work until it is done or the deadline has passed; see `time.monotonic`."""
        left = deadline - time.monotonic()
        if left <= 0:
            work.close()
            return
        scope = asyncio.timeout(left)
        self._running.add(scope)
        self._quiet.clear()
        try:
            async with scope:
                await work
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._running.discard(scope)
            if not self._running:
                self._quiet.set()

    async def close(self) -> None:
        """Let the deadline of every call be now, and wait until they have returned."""
        for scope in [each for each in self._running if not each.expired()]:
            scope.reschedule(asyncio.get_running_loop().time())
        await self._quiet.wait()


async def each(work: Callable[[int], Awaitable[None]], count: int, concurrency: int) -> None:
    """Do the work for every number below `count`, `concurrency` at a time; it raises only for bugs."""
    numbers = iter(range(count))

    async def work_off() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(count, concurrency)):
            group.create_task(work_off())
