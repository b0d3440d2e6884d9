"""Stores whose calls block: opened once, asked on threads in batches, closed once.

A subclass of `ThreadedBackend` says what is opened, and what a thread does with the keys of a job. When
that may happen, and what becomes of the keys when it may not, is said here.

A call is cut into a few jobs of neighbouring items, so that its price is paid per batch and not per
key. At the deadline, or when the call is cancelled, jobs that have not begun never begin, and those
that run are asked to stop; the call still returns only when the last of them has ended, because
until then a thread may touch the caller's buffers (S2, S3). Where jobs say when they touch them, a call
may leave its jobs behind and return at its deadline.

The standard library joins its pools when the interpreter ends, so a thread that the kernel holds
(a network filesystem that is gone) would hold its whole process. The threads here are daemons.
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
"""For a thread to come back and say what was late."""
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
    """Does work on at most `threads` threads, started as they are needed. Thread-safe.

    After `end`, the last thread to leave calls `at_end`, so that what the work needs can be given
    back as soon as nobody needs it, also when nobody waits for that any more.
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
        # A future that runs cannot be cancelled by somebody who stops waiting for it.
        self._ended.set_running_or_notify_cancel()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Have `work` done by the next thread that is free; the future can cancel it before.

        Raises `RuntimeError` after `end`, and where the system gives not even one thread.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._ending:
                raise RuntimeError(f"the threads of {self._name} have been told to end")
            if self._alive < min(self._threads, self._unfinished + 1):
                self._start_one()
            self._unfinished += 1
            self._jobs.put(_Job(future, work))
        return future

    def end(self) -> Future[None]:
        """Cancel what has not begun, and let each thread leave after what it does; does not wait.

        The future is done once the last thread has left and called `at_end`. Idempotent.
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
            # Those that there are do it all, only later.
            if not number:
                raise
        else:
            self._alive = number + 1

    def _live(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            # An idle thread holds no buffer of its last job.
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


class ThreadedBackend(ABC):
    """A store that is asked on `threads` threads at most. Used from one event loop.

    `store` names it in errors, `threads_name` the threads. A call becomes jobs for several threads
    only if each has as many bytes, or names, as are given here.
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
        """Open the store on its threads. Raises `ConfigError` where that does not work."""

    def _on_opened(self) -> None:  # noqa: B027 - not every store has something to do.
        """Do what comes once the store is open, if nobody has closed it meanwhile."""

    @abstractmethod
    def _give_back(self) -> None:
        """Close everything that was opened. The last thread that leaves does it."""

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Make the store ready; see `StorageBackend`."""
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
            # Without a wait: the thread may hang, and closes what it opened when it does not.
            await calls.close(0)
            raise
        self._calls = calls

    async def close(self) -> None:
        """Stop what runs, wait for it, and close everything that was opened. Idempotent.

        If a thread is held for longer than the close waits, or the close is cancelled, the call that
        waits for the thread returns when it does, and the last one closes everything. None of them
        keeps the process from ending.
        """
        self._closed = True
        calls, self._calls = self._calls, None
        if calls is not None:
            await calls.close(CLOSE_TIMEOUT_S)

    def _ready(self) -> ThreadCalls | None:
        """Return the threads, or None after `close`."""
        if self._calls is None and not self._closed:
            raise UsageError(f"store {self._store} is not open; await open() first")
        return self._calls

    async def _run_by_names(
        self,
        job: Callable[[Sequence[ObjectName], Stop], list[bool]],
        names: Sequence[ObjectName],
        deadline: float,
    ) -> list[bool]:
        """Return what the threads say of each name; False for what is late, and after `close`."""
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
        """Return what became of each key on the threads; `late` where its job never began.

        After `close` all of them are FAILED.
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
        """Yield what `listed` tells on a thread, in parts; `stop` has the deadline of each of them.

        Nothing after `close`; raises `StorageError` where that comes in between, or a part is late.
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
                why = str(error) or "no answer came in time; check the filesystem that it is on"
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
