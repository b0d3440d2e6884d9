"""Code that all `lockstep store` subcommands share.

It opens and closes the store, handles signals, shows progress, and prints the partial result after a
failure.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ...errors import StorageError
from ...storage_backends.base import StorageBackend, StoredObject
from ..cli.amounts import shown_store
from ..cli.interruption import Interrupted, raise_on_signals
from .progress import StoreProgress, store_progress
from .store_opening import opened_store

Result = TypeVar("Result")

_EXIT_CORRUPT: Final = 1
"""Exit status if an object was corrupt."""
_EXIT_INCOMPLETE: Final = 3
"""Exit status if an object could not be read, written or removed."""


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """An opened store, with the progress display of the subcommand that uses it."""

    backend: StorageBackend
    uri: str
    progress: StoreProgress

    @property
    def shown(self) -> str:
        """The store's URI without secrets, escaped for a terminal."""
        return shown_store(self.uri)

    async def listed(self) -> AsyncIterator[StoredObject]:
        """Yield the store's objects. Raises `StorageError` if the store does not answer."""
        try:
            async for stored in self.backend.objects():
                yield stored
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise StorageError(f"store {self.shown!r} could not be listed: {reason}") from error


def run_on_store(
    uri: str, work: Callable[[OpenedStore], Awaitable[Result]], *, looking: bool = False
) -> Result:
    """Open a store, run `work` on it, close the store, and return the result of `work`.

    The first SIGINT or SIGTERM cancels the work, closes the store, and raises `Interrupted`. A second
    signal ends the process at once, because closing the store may hang. `looking` is passed to
    `opened_store`.
    """

    async def opened() -> Result:
        async with opened_store(uri, looking=looking) as backend:
            with store_progress() as progress:
                return await work(OpenedStore(backend, uri, progress))

    return _run_until_interrupted(opened())


@contextmanager
def reporting_partial(tell: Callable[[], object]) -> Generator[None]:
    """On `Interrupted` or `StorageError`, call `tell` to print the partial result, and re-raise."""
    try:
        yield
    except (Interrupted, StorageError):
        tell()
        raise


def exit_status(*, corrupt: int = 0, incomplete: int = 0) -> int:
    """Return the exit status, given the numbers of corrupt and of unprocessed objects."""
    if corrupt:
        return _EXIT_CORRUPT
    return _EXIT_INCOMPLETE if incomplete else 0


def _run_until_interrupted(work: Coroutine[Any, Any, Result]) -> Result:
    async def watched() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
            task.cancel()

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        raise_on_signals()
