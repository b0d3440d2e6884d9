"""A page index as one store asks it: from the event loop, in threads that can be left behind.

The index blocks. Its threads touch no caller's memory, so nobody has to wait for them.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from ...errors import ConfigError, StorageError
from ..page_index.contract import (
    SLOTS_MAX,
    Commit,
    CommitOutcome,
    Entry,
    PageIndex,
    Reservation,
    Settings,
    Used,
)
from ..thread_calls import ThreadCalls

Result = TypeVar("Result")

_SETTINGS: Final = Settings(slot_bytes=0, file_slots=0)
"""Settings that no store with slots has. Here a slot stands for nothing but its generation: there is no
end of slots, so that no entry gives way for want of one."""
_THREADS: Final = 4
_TIMEOUT_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 10.0
_LEASE_S: Final = 600.0


class StoreIndex:
    """The index of the store that `owner` names. Every call raises `StorageError` if it fails."""

    def __init__(self, index: PageIndex, owner: str, *, read_only: bool = False) -> None:
        self._index = index
        self._owner = owner
        self._read_only = read_only
        self._threads: ThreadCalls | None = None

    async def open(self) -> None:
        """Open the index, and make sure that it is this store's. Raises `ConfigError`."""
        threads = ThreadCalls(_THREADS, "lockstep-s3-index", at_end=self._index.close)
        self._threads = threads
        try:
            await self._ask(self._open)
        except BaseException as error:
            self._threads = None
            # Without a wait: a thread may hang, and closes what it opened when it does not.
            await threads.close(0)
            if isinstance(error, StorageError):
                raise ConfigError(
                    f"store {self._owner}: {error}; check the database that index= names"
                ) from error
            raise

    async def look_up(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each key."""
        return await self._ask(partial(self._index.look_up, keys))

    async def commit(self, wishes: Sequence[tuple[Entry, int]]) -> list[CommitOutcome]:
        """Give keys their places. Each wish has the generation of the entry to give way, or 0.

        The generations of the entries themselves are chosen here.
        """
        lent = await self._ask(partial(self._reserve, len(wishes)))
        commits = [
            Commit(entry._replace(generation=generation), slot, replaces)
            for (entry, replaces), (slot, generation) in zip(wishes, lent, strict=True)
        ]
        return await self._ask(partial(self._index.commit, commits))

    async def drop(self, entries: Sequence[Entry]) -> None:
        """Forget entries that turned out to be wrong, as far as they still stand."""
        await self._ask(partial(self._index.drop, entries))

    async def remove(self, keys: Sequence[bytes]) -> list[Entry]:
        """Forget the entries of these keys; return those that there were."""
        entries = await self.look_up(keys)
        await self._ask(partial(self._index.remove, keys))
        return [entry for entry in entries if entry is not None]

    async def entries(self) -> AsyncIterator[list[Used]]:
        """Yield all entries, some at a time."""
        batches = self._index.entries()
        while some := await self._ask(partial(next, batches, None)):
            yield some

    async def close(self) -> None:
        """Close the index when no thread asks it any more. Idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            await threads.close(_CLOSE_TIMEOUT_S)

    def _open(self) -> None:
        kind, _, path = self._index.text.partition("://")
        if self._read_only and kind == "sqlite" and not Path(path).is_file():
            raise ConfigError(
                f"store {self._owner}: its index {path} does not exist, and with read_only=1 none is "
                "made; give the index that engines have in their store's URI"
            )
        self._index.open()
        whose = self._claim()
        if whose != self._owner:
            raise ConfigError(
                f"store {self._owner}: index {self._index.text} belongs to {whose}; give it its own"
            )

    def _claim(self) -> str:
        """Make the index this store's if there is nothing in it, and return whose it is."""
        index = self._index
        alike = index.agree(_SETTINGS) == _SETTINGS
        whose = index.identity(self._owner) if alike else "a store with slots"
        if whose == self._owner and not self._read_only:
            index.provide(SLOTS_MAX)
        return whose

    def _reserve(self, count: int) -> list[Reservation]:
        lent = self._index.reserve(count, _LEASE_S)
        if len(lent) < count:
            # A database that has lost everything does not know whose it is, nor of any slot. Another
            # store may have come first since.
            whose = self._claim()
            if whose != self._owner:
                raise StorageError(f"index {self._index.text} was lost and belongs to {whose} now")
            lent = self._index.reserve(count, _LEASE_S)
        if len(lent) < count:
            raise StorageError(f"index {self._index.text} has no room")
        return lent

    async def _ask(self, work: Callable[[], Result]) -> Result:
        if self._threads is None:
            raise StorageError(f"index {self._index.text} is closed")
        try:
            return await self._threads.once(work, _TIMEOUT_S)
        except TimeoutError:
            raise StorageError(f"index {self._index.text} did not answer") from None
        except RuntimeError as error:
            raise StorageError(f"index {self._index.text} is being closed") from error
