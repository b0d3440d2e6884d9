"""What can be wrong with one rank: its store, one of its copies, or its trust in checksums."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.page_format.object_header import HEADER_BYTES, HeaderFinding
from lockstep.page_format.object_name import ObjectName, located
from lockstep.page_format.object_shape import Run
from lockstep.ranks import opening
from lockstep.ranks.config import RECORD_POOLS
from lockstep.ranks.disaggregation.pages.page_server import PageServer
from lockstep.ranks.executor.copies import CopyJob, CpuCopies
from lockstep.ranks.orders import KV_POOL, Direction, ObjectTransfer
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.file import contents as file_contents
from lockstep.storage_backends.wrappers.base import Wrapper

SLOW_S = 0.2

Answer = TypeVar("Answer")


class Slow(Wrapper):
    """Every read takes 200 ms longer."""

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        await asyncio.sleep(SLOW_S)
        return await super().read(reads, deadline=deadline)


class Down(Wrapper):
    """From the first lookup on nothing works: no object can be seen, read or written."""

    down = False

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        self.down = True
        return await self.fail([False] * len(names))

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        if not self.down:
            return await super().read(reads, deadline=deadline)
        return await self.fail([ReadOutcome.FAILED] * len(reads))

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        if not self.down:
            return await super().write(writes, deadline=deadline)
        return await self.fail([WriteOutcome.FAILED] * len(writes))

    async def fail(self, answer: Answer) -> Answer:
        """Answer a call at once."""
        return answer


class Silent(Down):
    """From the first lookup on nothing ever comes back, which only deadlines end."""

    async def fail(self, answer: Answer) -> Answer:
        """Never answer a call."""
        await asyncio.Event().wait()
        return answer


class Damaged(Wrapper):
    """One object of each pool, in a store of files, is damaged before it is read."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self._reads = Counter[str]()
        self._damaged = set[ObjectName]()

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        for each in reads:
            if each.name.pool in RECORD_POOLS or each.name in self._damaged:
                continue
            if self._is_due(each.name.pool):
                self._damaged.add(each.name)
                self._damage(each.name)
        return await super().read(reads, deadline=deadline)

    def _is_due(self, pool: str) -> bool:
        """Say whether it is this pool's turn: not that of two pools in one request's prefetch."""
        self._reads[pool] += 1
        return self._reads[pool] == 4 + 12 * list(self._reads).index(pool)

    def _damage(self, name: ObjectName) -> None:
        found = located(name)
        behind: Any = self.behind
        assert found is not None
        flip_a_byte(Path(behind.root) / found[1])


class Poisoned(Damaged):
    """Everything is damaged but the pages of the main pool."""

    def _is_due(self, pool: str) -> bool:
        return pool != KV_POOL


def flip_a_byte(path: Path) -> None:
    """Change the highest byte of a number in the middle of an object's payload."""
    content = bytearray(path.read_bytes())
    middle = (HEADER_BYTES + (len(content) - HEADER_BYTES) // 2) // 4 * 4 + 3
    content[middle] ^= 0x41
    path.write_bytes(content)


def _trust_spoiled_store(kind: Callable[[StorageBackend], Wrapper]) -> None:
    _trust_every_byte()
    _spoil_store(kind)


def _spoil_store(kind: Callable[[StorageBackend], Wrapper]) -> None:
    module: Any = opening
    make: Callable[[str], StorageBackend] = module.make_backend

    def make_spoiled(uri: str) -> StorageBackend:
        return kind(make(uri))

    module.make_backend = make_spoiled


def _fail_a_load_half_way() -> None:
    """Let the third load copy half of its pages, write over the next one, and fail."""
    engine: Any = CpuCopies
    copy: Callable[[CpuCopies, CopyJob], None] = engine._copy
    loads = 0

    def copy_half(self: Any, job: CopyJob) -> None:
        nonlocal loads
        loads += job.direction is Direction.TO_DEVICE
        if job.direction is not Direction.TO_DEVICE or loads != 3:
            return copy(self, job)
        pairs = [
            pair
            for transfer in job.transfers
            for pair in zip(transfer.sources, transfer.destinations, strict=True)
        ]
        device = next(iter(self._pools.values())).pairs
        for at, (_, destination) in enumerate(pairs[: len(pairs) // 2 + 1]):
            for pair in device:
                pair.device.view(torch.uint8)[:, destination] = at
        raise RuntimeError("this copy fails half-way, by order of the test")

    engine._copy = copy_half


def _trust_every_byte() -> None:
    """Take a payload for sound without looking at it."""
    contents: Any = file_contents

    def trust(header: memoryview, run: Run, checksums: bytes) -> HeaderFinding:
        return HeaderFinding.SOUND

    contents.check_run = trust


def _lose_pages_on_the_way() -> None:
    """Offer readers of other groups all that is served but every fifth page."""
    server: Any = PageServer
    serve: Callable[[PageServer, int, Sequence[ObjectTransfer]], None] = server.serve
    offered = 0

    def serve_some(self: PageServer, operation: int, transfers: Sequence[ObjectTransfer]) -> None:
        nonlocal offered
        kept: list[ObjectTransfer] = []
        for each in transfers:
            pairs: list[tuple[bytes, int]] = []
            for pair in zip(each.keys, each.pages, strict=True):
                offered += 1
                if offered % 5:
                    pairs.append(pair)
            keys, pages = tuple(key for key, _ in pairs), tuple(page for _, page in pairs)
            kept.append(each._replace(keys=keys, pages=pages))
        serve(self, operation, kept)

    server.serve = serve_some


FAULTS: dict[str, Callable[[], None]] = {
    "slow": lambda: _spoil_store(Slow),
    "down": lambda: _spoil_store(Down),
    "silent": lambda: _spoil_store(Silent),
    "damaged": lambda: _spoil_store(Damaged),
    "poisoned": lambda: _trust_spoiled_store(Poisoned),
    "half a load": _fail_a_load_half_way,
    "trusting": _trust_every_byte,
    "lost on the way": _lose_pages_on_the_way,
}


def afflict(fault: str) -> None:
    """Bring a fault upon this process."""
    FAULTS[fault]()
