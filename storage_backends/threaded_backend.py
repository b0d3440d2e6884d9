"""Base class of backends with blocking calls, which are executed in jobs on threads.

A subclass of `ThreadedBackend` defines how to open the store and how a thread processes the keys of a
job. This module decides when jobs run, and sets the outcome of keys whose job cannot run.

A call is cut into a few jobs of consecutive keys, so that overhead is paid per job and not per key. At
the deadline, or when the call is cancelled, queued jobs are dropped and running jobs are signalled to
stop. The call still returns only when the last job has finished, because until then a thread may touch
the caller's buffers (S2, S3). A call with `leaves` may return at its deadline while jobs still run,
because such jobs touch the caller's buffers only inside `Stop.touching`.

The threads are daemons: the standard library joins all other threads at interpreter exit, so a thread
stuck in the kernel (for example on a dead network filesystem) would block the exit.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from ..errors import StorageError, UsageError
from ..page_format.object_name import ObjectName
from .base import Read, ReadOutcome, StoredObject, Write, WriteOutcome

Item = TypeVar("Item")
Result = TypeVar("Result")
Key = TypeVar("Key", Read, Write)
Outcome = TypeVar("Outcome", ReadOutcome, WriteOutcome)

CLOSE_TIMEOUT_S: Final = 10.0
_LIST_TIMEOUT_S: Final = 60.0
_LIST_TIMEOUT_MORE_S: Final = 5.0
"""Seconds added to the timeout of a listing's batch, so that the batch's thread can report why the
batch is late."""
_LISTED_AT_A_TIME: Final = 256


@dataclass(frozen=True, slots=True)
class _Job(Generic[Result]):
    future: Future[Result]
    work: Callable[[], Result]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited.
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class DaemonThreads:
    """Runs submitted functions on at most `threads` daemon threads, started on demand. Thread-safe.

    After `end`, the last thread to exit calls `at_end`, so that shared resources are released as soon
    as no thread uses them.
    """

    def __init__(self, threads: int, name: str, *, at_end: Callable[[], None]) -> None:
        self._threads = threads
        self._name = name
        self._at_end = at_end
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._unfinished = 0
        self._ending = False
        self._ended: Future[None] = Future()
        # Mark the future as running, so that cancelling a wait for it does not cancel the future
        # itself.
        self._ended.set_running_or_notify_cancel()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on the next free thread, unless the returned future is cancelled before that.

        Raises `RuntimeError` after `end`, or if the system cannot start even one thread.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._ending:
                raise RuntimeError(f"the threads of {self._name} are stopping")
            if self._alive < min(self._threads, self._unfinished + 1):
                self._start_one()
            self._unfinished += 1
            self._jobs.put(_Job(future, work))
        return future

    def end(self) -> Future[None]:
        """Cancel queued functions and let each thread exit after its current one; does not wait.

        The returned future is done once the last thread has exited and called `at_end`. Idempotent.
        """
        queued: list[_Job[Any]] = []
        with self._lock:
            if self._ending:
                return self._ended
            self._ending = True
            with suppress(Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    queued.append(job)
            for _ in range(self._alive):
                self._jobs.put(None)
            nobody = not self._alive
        for job in queued:
            job.future.cancel()
        if nobody:
            self._say_ended()
        return self._ended

    def _start_one(self) -> None:
        number = self._alive
        thread = threading.Thread(target=self._live, name=f"{self._name}_{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # Go on with the existing threads, because the system cannot start another one.
            if not number:
                raise
        else:
            self._alive = number + 1

    def _live(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            # Drop the reference to the finished job, so that an idle thread does not keep its buffers
            # alive.
            del job
            with self._lock:
                self._unfinished -= 1
        with self._lock:
            self._alive -= 1
            last = not self._alive
        if last:
            self._say_ended()

    def _say_ended(self) -> None:
        try:
            self._at_end()
        except Exception as error:  # noqa: BLE001 - it is raised where the end is awaited.
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


class Stop:
    """The deadline and stop flag of a call; a running job checks them between two keys."""

    __slots__ = ("_touched", "_touching", "deadline", "requested")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.requested = False
        self._touching = 0
        self._touched = threading.Condition()

    @contextmanager
    def touching(self) -> Generator[bool]:
        """Yield whether the job may use the caller's buffers; if so, hold its call open meanwhile.

        The value is False once the call was stopped or its deadline has passed. A call that is held
        open does not return to its caller before the block has ended.
        """
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
        """Wait until no job is inside `touching`; from then on `touching` yields False.

        The call may then return although its jobs still run.
        """
        with self._touched:
            self.requested = True
            self._touched.wait_for(lambda: not self._touching)

    def due(self) -> bool:
        """Return whether the job should stop before the next key."""
        return self.requested or time.monotonic() >= self.deadline


class ThreadCalls:
    """Runs the jobs of calls from one event loop on `threads` daemon threads.

    The last thread that exits after `close` calls `at_end` once, to release resources that no call uses
    any more.
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
        """Run `work` on a thread, and return its result or raise its exception.

        Raises `TimeoutError` after `timeout_s`. After a timeout or a cancellation the thread continues
        the work, although no caller waits. Raises `StorageError` if `close` was called before a
        thread started the work.
        """
        answer = asyncio.wrap_future(self._pool.submit(work))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if answer.cancelled() and task is not None and not task.cancelling():
                # Raise `StorageError`, because `close` cancelled the job. A `CancelledError` would mean
                # that the caller itself was cancelled.
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
        """Return one result for each of `items`, in order; `late` for items whose job never started.

        `job` processes some items in a thread and returns one result for each. It checks its `Stop`
        between two items, and raises only for bugs. `weights` is the amount of work per item. Each job
        gets at least `job_weight_min` of work, unless the whole call has less. The call returns when no
        thread touches the items any more, even if the deadline has passed by then.

        With `leaves` the call returns at its deadline without the results of jobs that still run; the
        results of their items are `late`. Such jobs touch the caller's memory only inside
        `Stop.touching`.
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
        """Return the number of threads that still run a job whose call has already returned."""
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
        """Signal all calls to stop and wait for them; return whether all finished in time. Idempotent.

        A thread stuck in the kernel is left running. The call that waits for this thread returns only
        when the thread is no longer stuck, even if the call is cancelled. If `at_end` raises an
        exception, this method raises it too.
        """
        for stop in self._stops:
            stop.requested = True
        # Signal the threads before the first await, so that they stop even if this task is cancelled.
        ended = self._pool.end()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(ended)
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True


def _cut(weights: Sequence[int], total: int, threads: int, job_weight_min: int) -> list[slice]:
    """Cut the items of a call into one slice per job; return at most `threads` slices.

    Each slice but the last has a weight of at least `job_weight_min`.
    """
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
    """Wakes the event loop once, when the last job of a call is done.

    Earlier jobs do not wake the loop, because every wake-up makes all other threads wait.
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
            # Ignore the `RuntimeError` of a closed event loop. A call with `leaves` returns before its
            # jobs are done, so the loop may be closed by then.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.come.done():
            self.come.set_result(None)


async def _wait_for_all(jobs: Sequence[Future[list[Result]]], stop: Stop, *, leaves: bool) -> None:
    """Wait until every job is done, even after a cancellation, which is raised at the end.

    If `leaves` is set, wait only until the deadline or a cancellation.
    """
    done = _AllDone(jobs)
    cancelled: asyncio.CancelledError | None = None
    while not done.come.done():
        unhurried = stop.requested and not leaves
        timeout_s = None if unhurried else max(0.0, stop.deadline - time.monotonic())
        try:
            await asyncio.wait([done.come], timeout=timeout_s)
        except asyncio.CancelledError as error:
            cancelled = error
        if not done.come.done():
            stop.requested = True
            for job in jobs:
                job.cancel()
            if leaves:
                break
    if cancelled is not None:
        raise cancelled


class ThreadedBackend(ABC):
    """Base class of a store that is accessed on at most `threads` threads, from one event loop.

    Errors contain `store` as the store's name, and the threads are named `threads_name`. A call is
    split into several jobs only if each job gets at least `job_bytes_min` bytes or `job_names_min`
    names.
    """

    def __init__(
        self,
        store: str,
        threads_name: str,
        *,
        threads: int,
        job_bytes_min: int,
        job_names_min: int = 1,
    ) -> None:
        self._store = store
        self._threads_name = threads_name
        self._threads = threads
        self._job_bytes_min = job_bytes_min
        self._job_names_min = job_names_min
        self._calls: ThreadCalls | None = None
        self._open_was_called = False
        self._closed = False

    @abstractmethod
    async def _open_on(self, calls: ThreadCalls, memory: Sequence[memoryview]) -> None:
        """Open the store on its threads. Raises `ConfigError` if that fails."""

    def _on_opened(self) -> None:  # noqa: B027 - not every store has something to do.
        """Hook for subclasses: called once the store is open, unless it was closed meanwhile."""

    @abstractmethod
    def _give_back(self) -> None:
        """Close everything that the subclass has opened. The last thread to exit calls this."""

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Open the store; see `StorageBackend`."""
        if self._open_was_called or self._closed:
            raise UsageError(f"store {self._store} was opened before; make a new backend")
        self._open_was_called = True
        calls = ThreadCalls(self._threads, self._threads_name, at_end=self._give_back)
        try:
            await self._open_on(calls, memory)
            if self._closed:
                raise UsageError(f"store {self._store} was closed while it opened")
            self._on_opened()
        except BaseException:
            # Do not wait for the opening thread, because it may hang. If it returns later, it closes
            # the resources that it opened.
            await calls.close(0)
            raise
        self._calls = calls

    async def close(self) -> None:
        """Stop running jobs, wait for them, and close everything that was opened. Idempotent.

        A thread may hang beyond the timeout of `close`, or `close` may be cancelled. Then the call of
        the hanging thread returns only when the thread hangs no more, and the last thread to exit
        closes everything. Threads do not keep the process from exiting.
        """
        self._closed = True
        calls, self._calls = self._calls, None
        if calls is not None:
            await calls.close(CLOSE_TIMEOUT_S)

    def _ready(self) -> ThreadCalls | None:
        """Return the `ThreadCalls` of this store, or None after `close`.

        Raises `UsageError` before `open`.
        """
        if self._calls is None and not self._closed:
            raise UsageError(f"store {self._store} is not open; await open() first")
        return self._calls

    async def _run_by_names(
        self,
        job: Callable[[Sequence[ObjectName], Stop], list[bool]],
        names: Sequence[ObjectName],
        deadline: float,
    ) -> list[bool]:
        """Run `job` over the names, in slices on threads, and return one result per name.

        The result is False for names whose slice was never started, and for all names after `close`.
        """
        calls = self._ready()
        if calls is None:
            return [False] * len(names)
        return await calls.run(
            job,
            names,
            weights=[1] * len(names),
            job_weight_min=self._job_names_min,
            late=False,
            deadline=deadline,
        )

    async def _run_by_bytes(
        self,
        job: Callable[[Sequence[Key], Stop], list[Outcome]],
        keys: Sequence[Key],
        late: Outcome,
        deadline: float,
    ) -> list[Outcome]:
        """Run `job` over the keys, in slices on threads, and return one outcome per key.

        The outcome is `late` for keys whose slice was never started. After `close` all outcomes are
        FAILED.
        """
        calls = self._ready()
        if calls is None:
            return [type(late).FAILED] * len(keys)
        return await calls.run(
            job,
            keys,
            weights=[key.shape.nbytes for key in keys],
            job_weight_min=self._job_bytes_min,
            late=late,
            deadline=deadline,
        )

    async def _list(
        self, listed: Iterator[StoredObject], stop: Stop | None = None
    ) -> AsyncIterator[StoredObject]:
        """Yield the objects of `listed`, which a thread iterates in batches.

        Sets `stop.deadline` for each batch. Yields nothing after `close`. Raises `StorageError` if the
        store is closed during the listing, or if a batch is late.
        """
        calls = self._ready()
        while calls is not None:
            if stop is not None:
                stop.deadline = time.monotonic() + _LIST_TIMEOUT_S
            try:
                some = await calls.once(
                    partial(list[StoredObject], islice(listed, _LISTED_AT_A_TIME)),
                    _LIST_TIMEOUT_S + _LIST_TIMEOUT_MORE_S,
                )
            except (TimeoutError, StorageError) as error:
                why = str(error) or "no answer came in time; check its filesystem"
                raise StorageError(f"store {self._store} could not be listed: {why}") from error
            if not some:
                return
            for each in some:
                yield each
            calls = self._ready()
            if calls is None:
                raise StorageError(
                    f"store {self._store} was closed while it was listed; open it again and list it "
                    "from the beginning"
                )
