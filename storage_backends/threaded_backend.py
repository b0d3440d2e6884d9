"""What the stores have in common whose calls block: opened once, asked on threads, closed once.

A subclass says what is opened, and what a thread does with the keys of a job. When that may happen, and
what becomes of the keys when it may not, is said here.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

from ..errors import StorageError, UsageError
from ..page_format.object_name import ObjectName
from .base import Counters, Read, ReadOutcome, StoredObject, Write, WriteOutcome
from .tally import Tally
from .thread_calls import Stop, ThreadCalls

Key = TypeVar("Key", Read, Write)
Outcome = TypeVar("Outcome", ReadOutcome, WriteOutcome)
Result = TypeVar("Result")
Job = Callable[[Sequence[Key], Stop], list[Outcome]]

CLOSE_TIMEOUT_S: Final = 10.0


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
        self._tally = Tally()

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

    def counters(self) -> Counters:
        """Return what was seen since the backend was made."""
        return self._tally.counters()

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
        self, job: Job[Key, Outcome], keys: Sequence[Key], late: Outcome, deadline: float
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
        self, next_some: Callable[[ThreadCalls], Awaitable[list[StoredObject]]]
    ) -> AsyncIterator[StoredObject]:
        """Yield what `next_some` tells each time, until that is nothing.

        Nothing after `close`; raises `StorageError` where that comes in between.
        """
        calls = self._ready()
        while calls is not None:
            some = await next_some(calls)
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
