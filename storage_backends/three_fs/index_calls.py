"""Calls of a `3fs://` store to its page index, on threads that may stay blocked after a timeout.

A call of the index blocks while the database does not answer. The threads of this module never touch
callers' buffers, so a backend call can return at its deadline although its thread is still blocked. To
other processes, a call that finishes late looks like the last call of a writer that died.
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
"""Number of threads that call the index. More would only wait for each other in the database."""
_POLL_S: Final = 0.05
"""Seconds after which a waiting thread checks again whether it should stop."""
_END_S: Final = 5.0


class LateError(StorageError):
    """The index did not answer before the deadline or before the store was closed."""


class IndexCalls:
    """Queries one open index. Thread-safe.

    All methods raise `LateError` at their deadline, and `StorageError` for failures of the index,
    including answers that this software cannot have written.
    """

    def __init__(self, index: PageIndex) -> None:
        self._index = index
        self._pool = DaemonThreads(_THREADS, "lockstep-3fs-index", at_end=index.close)

    async def ask(self, work: Callable[[PageIndex], Result], deadline: float) -> Result:
        """Return the result of `work` on the index. After a timeout the work may still be done."""
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
        """Reserve at most `count` slots of a store with `slots` slots; see `PageIndex.reserve`.

        Slots that the index reserves after the call has timed out are released again.
        """

        def reserve(index: PageIndex) -> list[Reservation]:
            lent = index.reserve(count, lease_s)
            if not lent:
                # Set the number of slots in the index again, because the database may have been lost
                # and created again without the number.
                index.provide(slots)
                lent = index.reserve(count, lease_s)
            return lent

        def give_back(future: Future[list[Reservation]]) -> None:
            with suppress(StorageError, CancelledError):
                self._index.release(future.result())

        return self.call(reserve, stop, too_late=give_back)

    def entries(self, stop: Stop) -> Iterator[list[Used]]:
        batches = self._index.entries()
        while some := self.call(lambda _: next(batches, None), stop):
            yield some

    def close(self) -> None:
        """Close the index once no thread uses it; waits for at most `_END_S`. Idempotent."""
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
        """Return the result of `work` on the index; the calling thread checks `stop` while it waits.

        If the call times out while the work runs, the work continues. When the work ends, `too_late` is
        called with the work's future.
        """
        future = self._submit(partial(work, self._index))
        while not stop.due():
            left_s = stop.deadline - time.monotonic()
            try:
                return future.result(max(0.0, min(left_s, _POLL_S)))
            except TimeoutError:
                continue
            except CancelledError:
                break
        if not future.cancel() and too_late is not None:
            future.add_done_callback(too_late)
        raise self._late()

    def _checked(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except (ValueError, TypeError, OverflowError, TimeoutError) as error:
            raise StorageError(f"index {self._index.text} is damaged: {error}") from error

    def _late(self) -> LateError:
        return LateError(f"index {self._index.text} did not answer in time")
