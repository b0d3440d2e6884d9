"""Batched blocking work on a bounded pool of threads, with the deadlines and the care of S2 and S3.

A call is cut into a few jobs of neighbouring items, so that its price is paid per batch and not per
key. At the deadline, or when the call is cancelled, jobs that have not begun never begin, and those
that run are asked to stop; the call still returns only when the last of them has ended, because
until then a thread may touch the caller's buffers. Where jobs say when they touch them, a call may
leave its jobs behind and return at its deadline.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from ..errors import StorageError
from .daemon_threads import DaemonThreads

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stop:
    """What a running job looks at between two pieces of work."""

    __slots__ = ("_touched", "_touching", "asked", "deadline")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.asked = False
        self._touching = 0
        self._touched = threading.Condition()

    @contextmanager
    def touching(self) -> Generator[bool]:
        """Keep the call from returning while in here; gives False if it has, or is about to."""
        with self._touched:
            wanted = not self.due()
            self._touching += wanted
        try:
            yield wanted
        finally:
            with self._touched:
                self._touching -= wanted
                self._touched.notify_all()

    def leave(self) -> None:
        """Let the call end without its jobs: wait until none is `touching`, nor will be later."""
        with self._touched:
            self.asked = True
            self._touched.wait_for(lambda: not self._touching)

    def due(self) -> bool:
        """Say whether the job should begin nothing more."""
        return self.asked or time.monotonic() >= self.deadline


class ThreadCalls:
    """Runs calls from one event loop on `threads` threads, which the process can end without.

    `at_end` is called once, by the last thread that leaves after `close`: then no call touches what
    it gives back.
    """

    def __init__(self, threads: int, name: str, *, at_end: Callable[[], None]) -> None:
        self._threads = threads
        self._pool = DaemonThreads(threads, name, at_end=at_end)
        self._stops: set[Stop] = set()
        self._lock = threading.Lock()
        self._left = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def once(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Return what `work` returns, or raise what it raises.

        After `timeout_s`, which raises `TimeoutError`, and when it is cancelled, the thread goes on
        by itself. Raises `StorageError` if `close` came before a thread began with it.
        """
        answer = asyncio.wrap_future(self._pool.submit(work))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if answer.cancelled() and task is not None and not task.cancelling():
                # The threads were told to end: nobody has cancelled the caller.
                raise StorageError(
                    "the store was closed before it answered; open it again and repeat the call"
                ) from None
            raise

    async def run(
        self,
        job: Callable[[Sequence[Item], Stop], list[Result]],
        items: Sequence[Item],
        *,
        weights: Sequence[int],
        job_weight_min: int,
        late: Result,
        deadline: float,
        leaves: bool = False,
    ) -> list[Result]:
        """Return one result for each item, in order; `late` for those whose job never began.

        `job` works on some items in a thread and gives one result for each; it looks at its `Stop`
        between two of them, and raises only for bugs.

        `weights` says how much work each item is; no job gets less than `job_weight_min`, unless
        the whole call is less. Returns when no thread touches the items any more, however long
        that takes after the deadline.

        With `leaves` it returns at its deadline without the jobs that still run, and their results
        are `late`. Such jobs touch the caller's memory only while they are `Stop.touching`.
        """
        if not items:
            return []
        stop = Stop(deadline)
        slices = _cut(weights, sum(weights), self._threads, job_weight_min)
        self._stops.add(stop)
        self._quiet.clear()
        jobs: list[Future[list[Result]]] = []
        try:
            jobs = [self._pool.submit(partial(job, items[part], stop)) for part in slices]
            await _wait_for_all(jobs, stop, leaves=leaves)
        finally:
            if leaves:
                stop.leave()
                self._leave([each for each in jobs if each.running()])
            self._stops.discard(stop)
            if not self._stops:
                self._quiet.set()
        results: list[Result] = []
        for part, each in zip(slices, jobs, strict=True):
            brought = each.done() and not each.cancelled()
            results += each.result() if brought else [late] * (part.stop - part.start)
        return results

    @property
    def left(self) -> int:
        """How many threads are held by jobs of calls that have returned without them."""
        return self._left

    def _leave(self, jobs: Sequence[Future[list[Result]]]) -> None:
        with self._lock:
            self._left += len(jobs)
        for job in jobs:
            job.add_done_callback(self._came_back)

    def _came_back(self, _: object) -> None:
        with self._lock:
            self._left -= 1

    async def close(self, timeout_s: float) -> bool:
        """Ask all calls to stop and wait for them; say whether all ended in time. Idempotent.

        A thread that hangs in the kernel cannot be ended from here. It is left behind, and its
        call still returns only when it does; so also when the wait is cancelled. Raises what
        `at_end` raises.
        """
        for stop in self._stops:
            stop.asked = True
        # The threads are told before anything is awaited, so that they end whatever becomes of it.
        ended = self._pool.end()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(ended)
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True


def _cut(weights: Sequence[int], total: int, threads: int, job_weight_min: int) -> list[slice]:
    """Cut neighbouring items into a job for each thread, none under the least weight."""
    job_weight = max(job_weight_min, -(-total // threads))
    if total <= job_weight:
        return [slice(0, len(weights))]
    slices: list[slice] = []
    start = weight = 0
    for index, each in enumerate(weights, start=1):
        weight += each
        if weight >= job_weight:
            slices.append(slice(start, index))
            start, weight = index, 0
    if start < len(weights):
        slices.append(slice(start, len(weights)))
    return slices


class _AllDone:
    """Tells one event loop, once, that all jobs of a call are done.

    Each time a thread wakes the loop all other threads wait for them, so only the last job does.
    """

    def __init__(self, jobs: Sequence[Future[list[Result]]]) -> None:
        self._loop = asyncio.get_running_loop()
        self.come = self._loop.create_future()
        self._lock = threading.Lock()
        self._left = len(jobs)
        for job in jobs:
            job.add_done_callback(self._note)

    def _note(self, _: object) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            # The loop of a call that was left may have ended meanwhile.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self.come.done():
            self.come.set_result(None)


async def _wait_for_all(jobs: Sequence[Future[list[Result]]], stop: Stop, *, leaves: bool) -> None:
    """Wait until every job is done, whatever happens; then let a cancellation through.

    With `leaves` it waits no longer than to the deadline, or to a cancellation.
    """
    done = _AllDone(jobs)
    cancelled: asyncio.CancelledError | None = None
    while not done.come.done():
        unhurried = stop.asked and not leaves
        timeout_s = None if unhurried else max(0.0, stop.deadline - time.monotonic())
        try:
            await asyncio.wait([done.come], timeout=timeout_s)
        except asyncio.CancelledError as error:
            cancelled = error
        if not done.come.done():
            stop.asked = True
            for job in jobs:
                job.cancel()
            if leaves:
                break
    if cancelled is not None:
        raise cancelled
