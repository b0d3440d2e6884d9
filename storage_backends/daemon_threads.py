"""A bounded pool of threads that never keep their process from ending.

The pools of the standard library are joined when the interpreter ends. A thread that the kernel
holds (a network filesystem that is gone) would so hold its whole process for as long. The threads
here are daemons: whoever needs their work done waits for it, with a deadline, and goes on.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


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
