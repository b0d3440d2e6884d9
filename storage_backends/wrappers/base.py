"""Base classes of wrappers: backends that forward calls to another backend."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Generic, TypeVar

from ...page_format.object_name import ObjectName
from ..base import (
    Capabilities,
    Read,
    ReadOutcome,
    StorageBackend,
    StoredObject,
    Write,
    WriteOutcome,
)


class Wrapper:
    """Forwards every call to the wrapped backend; a subclass overrides some calls.

    A wrapper meets the contract of `StorageBackend` if the wrapped backend does. The wrapper owns that
    backend, and opens and closes it.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.behind = backend
        """The wrapped backend."""

    @property
    def capabilities(self) -> Capabilities:
        return self.behind.capabilities

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        await self.behind.open(memory)

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        return await self.behind.exists(names, deadline=deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        return await self.behind.read(reads, deadline=deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        return await self.behind.write(writes, deadline=deadline)

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        return await self.behind.remove(names, deadline=deadline)

    def objects(self) -> AsyncIterator[StoredObject]:
        return self.behind.objects()

    async def close(self) -> None:
        await self.behind.close()


Answer = TypeVar("Answer", ReadOutcome, WriteOutcome, bool)


class Call(StrEnum):
    """The kinds of calls to a backend."""

    EXISTS = "exists"
    READ = "read"
    WRITE = "write"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class PendingCall(Generic[Answer]):
    """A call that a wrapper has received and has not forwarded to the backend yet."""

    kind: Call
    keys: Sequence[ObjectName | Read | Write]
    deadline: float
    ask: Callable[[], Awaitable[list[Answer]]]
    """A function that forwards the call and returns one answer per key."""
    failed: Answer
    """The answer for a key that failed, or whose call was not forwarded."""
    late: Answer
    """The answer for a key whose deadline passed."""


class AroundWrapper(Wrapper, ABC):
    """A wrapper that passes every call to `_around`, which a subclass implements."""

    @abstractmethod
    async def _around(self, call: PendingCall[Answer]) -> list[Answer]:
        """Execute the call, for example by `call.ask`, and return one answer per key."""

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        ask = partial(self.behind.exists, names, deadline=deadline)
        call = PendingCall(Call.EXISTS, names, deadline, ask, failed=False, late=False)
        return await self._around(call)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        ask = partial(self.behind.read, reads, deadline=deadline)
        failed, late = ReadOutcome.FAILED, ReadOutcome.TIMED_OUT
        return await self._around(PendingCall(Call.READ, reads, deadline, ask, failed, late))

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        ask = partial(self.behind.write, writes, deadline=deadline)
        failed, late = WriteOutcome.FAILED, WriteOutcome.TIMED_OUT
        return await self._around(PendingCall(Call.WRITE, writes, deadline, ask, failed, late))

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        ask = partial(self.behind.remove, names, deadline=deadline)
        call = PendingCall(Call.REMOVE, names, deadline, ask, failed=False, late=False)
        return await self._around(call)
