"""A store that keeps no deadline: while it is held, none of its calls returns."""

import asyncio
import threading
from collections.abc import Sequence

from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import Read, ReadOutcome, Write, WriteOutcome
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from tests.kit.storage.calls import soon


class HeldStore(MemoryBackend):
    """A memory store; once it is let go, calls are carried out however late it is."""

    def __init__(self, shelf: Shelf | None = None) -> None:
        super().__init__(shelf if shelf is not None else Shelf())
        self.asked = threading.Event()
        """A call was held up."""
        self._free = threading.Event()
        self._to_hold = 0

    def of_any(self, _: object) -> "HeldStore":
        """Stand for the store of any URI, and behind or before any other."""
        return self

    def hold(self, calls: int = 1 << 30) -> None:
        """Hold up so many of the next calls."""
        self._to_hold = calls
        self._free.clear()

    def let_go(self) -> None:
        """Let all calls go on, and hold up none that comes."""
        self._to_hold = 0
        self._free.set()

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        await self._held()
        return await super().exists(names, deadline=soon())

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        await self._held()
        return await super().read(reads, deadline=soon())

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        await self._held()
        return await super().write(writes, deadline=soon())

    async def _held(self) -> None:
        if self._to_hold:
            self._to_hold -= 1
            self.asked.set()
            await asyncio.get_running_loop().run_in_executor(None, self._free.wait)
