"""Helpers for tests of storage wrappers: virtual time, and backends that fail or record calls."""

import asyncio
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.registry import WrapBackend
from lockstep.storage_backends.uri import parse_uri
from lockstep.storage_backends.wrappers.base import Wrapper
from tests.kit.storage.calls import now, object_name, page

T = TypeVar("T")
PAGE_BYTES = 512


class _JumpingSelector(selectors.DefaultSelector):
    """A selector for an event loop in virtual time: it never waits, but advances its clock."""

    def __init__(self) -> None:
        super().__init__()
        # Start weeks ahead of the machine's clock, so that a deadline computed with the machine's clock
        # has expired and fails the test.
        self.now = 2.0**21

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left that could happen: this is a hang"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: if no task can run, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(scenario: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


def a_while() -> float:
    """Return a deadline one hour ahead in virtual time, which only a hang reaches."""
    return now() + 3600.0


async def memory_store(numbers: Sequence[int] = ()) -> MemoryBackend:
    """Return an open memory store that has these pages and uses virtual time."""
    backend = MemoryBackend(Shelf(), clock=now)
    await backend.open()
    await backend.write([a_write(number) for number in numbers], deadline=a_while())
    return backend


def a_write(number: int, nbytes: int = PAGE_BYTES) -> Write:
    content = memoryview(page(number, nbytes))
    return Write(object_name(number), (content,), ObjectShape.whole(nbytes))


def a_read(number: int, nbytes: int = PAGE_BYTES) -> Read:
    return Read(object_name(number), (memoryview(bytearray(nbytes)),), ObjectShape.whole(nbytes))


def reads_of(*numbers: int) -> list[Read]:
    return [a_read(number) for number in numbers]


def writes_of(*numbers: int) -> list[Write]:
    return [a_write(number) for number in numbers]


def wrapped(wrap: WrapBackend, options: str, backend: StorageBackend) -> StorageBackend:
    """Wrap a backend with `wrap`; `options` are the wrapper's options in URI form."""
    name = wrap.__module__.rpartition(".")[2]
    return wrap(parse_uri(f"{name}+memory://{options}"), backend)


class Watched(Wrapper):
    """A backend wrapper that records the keys and the time of each call."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self.calls: list[list[ObjectName]] = []
        self.times: list[float] = []
        self.before: Callable[[], Awaitable[object]] | None = None

    async def _watch(self, names: Sequence[ObjectName]) -> None:
        self.calls.append(list(names))
        self.times.append(now())
        if self.before is not None:
            await self.before()

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        await self._watch(names)
        return await self.behind.exists(names, deadline=deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        await self._watch([read.name for read in reads])
        return await self.behind.read(reads, deadline=deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        await self._watch([write.name for write in writes])
        return await self.behind.write(writes, deadline=deadline)

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        await self._watch(names)
        return await self.behind.remove(names, deadline=deadline)


class Failing(Wrapper):
    """A backend wrapper whose calls fail for chosen keys.

    Each key fails as many times as `failures` says. While `down` is true, all keys fail.
    """

    def __init__(self, backend: StorageBackend, failures: dict[int, int] | None = None) -> None:
        super().__init__(backend)
        self.left = Counter({object_name(key): n for key, n in (failures or {}).items()})
        self.down = False

    def _fails(self, name: ObjectName) -> bool:
        if self.left[name] > 0:
            self.left[name] -= 1
            return True
        return self.down

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        return [
            not self._fails(name) and found
            for name, found in zip(
                names, await self.behind.exists(names, deadline=deadline), strict=True
            )
        ]

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        failing = [self._fails(read.name) for read in reads]
        forwarded = [read for read, fails in zip(reads, failing, strict=True) if not fails]
        answers = iter(await self.behind.read(forwarded, deadline=deadline))
        return [ReadOutcome.FAILED if fails else next(answers) for fails in failing]

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        failing = [self._fails(write.name) for write in writes]
        forwarded = [write for write, fails in zip(writes, failing, strict=True) if not fails]
        answers = iter(await self.behind.write(forwarded, deadline=deadline))
        return [WriteOutcome.FAILED if fails else next(answers) for fails in failing]

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        failing = [self._fails(name) for name in names]
        forwarded = [name for name, fails in zip(names, failing, strict=True) if not fails]
        answers = iter(await self.behind.remove(forwarded, deadline=deadline))
        return [not fails and next(answers) for fails in failing]
