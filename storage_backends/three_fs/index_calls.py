"""The page index as one `3fs://` store asks it: in threads that can be left behind.

An index blocks, for as long as its database does not answer. Its threads touch no caller's buffer, so
nobody has to wait for them: a question ends when its call does, and what the thread does afterwards is
what a writer that died then would have left.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from ...errors import StorageError
from ..threaded_backend import DaemonThreads, Stop
from .page_index import PageIndex, Reservation, Used

Result = TypeVar("Result")

_THREADS: Final = 4
"""More would wait for each other in the database."""
_POLL_S: Final = 0.05
"""How long a thread waits for an answer before it looks whether it was asked to stop."""
_END_S: Final = 5.0


class LateError(StorageError):
    """The time of the call was over, or the store was closed, before the index had answered."""


class IndexCalls:
    """Asks one open index. Thread-safe.

    All methods raise `LateError` when their time is over, and `StorageError` for what goes wrong with
    the index, also where it answers with what nobody has written to it.
    """

    def __init__(self, index: PageIndex) -> None:
        self._index = index
        self._pool = DaemonThreads(_THREADS, "lockstep-3fs-index", at_end=index.close)

    async def ask(self, work: Callable[[PageIndex], Result], deadline: float) -> Result:
        """Return what `work` returns of the index. It may go on after the deadline."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise self._late()
        answer = asyncio.wrap_future(self._submit(partial(work, self._index)))
        try:
            await asyncio.wait([answer], timeout=left_s)
            if not answer.done() or answer.cancelled():
                raise self._late()
            return answer.result()
        finally:
            answer.cancel()

    def reserve(self, count: int, lease_s: float, slots: int, stop: Stop) -> list[Reservation]:
        """Lend out at most `count` slots of `slots`; see `PageIndex`.

        Those that come too late for the call are given back.
        """

        def reserve(index: PageIndex) -> list[Reservation]:
            lent = index.reserve(count, lease_s)
            if not lent:
                # A database that has lost everything does not know how many slots there are.
                index.provide(slots)
                lent = index.reserve(count, lease_s)
            return lent

        def give_back(asked: Future[list[Reservation]]) -> None:
            with suppress(StorageError, CancelledError):
                self._index.release(asked.result())

        return self.call(reserve, stop, too_late=give_back)

    def entries(self, stop: Stop) -> Iterator[list[Used]]:
        batches = self._index.entries()
        while some := self.call(lambda _: next(batches, None), stop):
            yield some

    def close(self) -> None:
        """Close the index when no thread asks it any more; waits for a while. Idempotent."""
        with suppress(TimeoutError):
            self._pool.end().result(_END_S)

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        try:
            return self._pool.submit(partial(self._checked, work))
        except RuntimeError as error:
            raise self._late() from error

    def call(
        self,
        work: Callable[[PageIndex], Result],
        stop: Stop,
        *,
        too_late: Callable[[Future[Result]], None] | None = None,
    ) -> Result:
        """Return what `work` returns of the index, from a thread that looks at its `stop` meanwhile.

        What is late is done all the same, if the index comes to it.
        """
        asked = self._submit(partial(work, self._index))
        while not stop.due():
            left_s = stop.deadline - time.monotonic()
            try:
                return asked.result(max(0.0, min(left_s, _POLL_S)))
            except TimeoutError:
                continue
            except CancelledError:
                break
        if not asked.cancel() and too_late is not None:
            asked.add_done_callback(too_late)
        raise self._late()

    def _checked(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except (ValueError, TypeError, OverflowError, TimeoutError) as error:
            raise StorageError(f"index {self._index.text} is damaged: {error}") from error

    def _late(self) -> LateError:
        return LateError(f"index {self._index.text} did not answer in time")
