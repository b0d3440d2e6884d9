"""Faults to inject on one rank: a failing or corrupting store, a failing load, no checksums."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.page_format.object_header import HEADER_BYTES, HeaderFinding
from lockstep.page_format.object_name import ObjectName, located
from lockstep.page_format.object_shape import PartRun
from lockstep.ranks.executor.copies import CopyJob, CpuCopies
from lockstep.ranks.group import opening
from lockstep.ranks.protocol.config import RECORD_POOLS
from lockstep.ranks.protocol.orders import KV_POOL, Direction
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.file import contents as file_contents
from lockstep.storage_backends.wrappers.base import Wrapper


class Down(Wrapper):
    """A store wrapper whose lookups find nothing. From the first lookup on, reads and writes fail."""

    down = False

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        self.down = True
        return [False] * len(names)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        if not self.down:
            return await super().read(reads, deadline=deadline)
        return [ReadOutcome.FAILED] * len(reads)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        if not self.down:
            return await super().write(writes, deadline=deadline)
        return [WriteOutcome.FAILED] * len(writes)


class Poisoned(Wrapper):
    """A store wrapper that corrupts each object before its first read.

    Pages of the main pool are not corrupted.
    """

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self._damaged = set[ObjectName]()

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        behind: Any = self.behind
        for each in reads:
            if each.name.pool in {KV_POOL, *RECORD_POOLS} or each.name in self._damaged:
                continue
            self._damaged.add(each.name)
            found = located(each.name)
            assert found is not None
            flip_a_byte(Path(behind.root) / found[1])
        return await super().read(reads, deadline=deadline)


def flip_a_byte(path: Path) -> None:
    """Change one byte in the middle of an object's payload: the highest byte of a 4-byte number."""
    content = bytearray(path.read_bytes())
    middle = (HEADER_BYTES + (len(content) - HEADER_BYTES) // 2) // 4 * 4 + 3
    content[middle] ^= 0x41
    path.write_bytes(content)


def objects(folder: Path, rank: int) -> list[Path]:
    """Return the page files in one rank's file store, sorted by path.

    The store has one folder for pages and one for the manifest; the folder with more files has the
    pages. This folder also has the one-byte record of the group's TP size, which is left out.
    """
    namespaces = (folder / f"rank{rank}" / "objects").iterdir()
    files = max((sorted(_files_under(each)) for each in namespaces), key=len)
    return [path for path in files if path.stat().st_size > HEADER_BYTES + 1]


def _files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


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
    """Make the third load write wrong bytes to half of its pages and then fail."""
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
    """Make every payload checksum pass without computing it."""
    contents: Any = file_contents

    def trust(header: memoryview, run: PartRun, checksums: bytes) -> HeaderFinding:
        return HeaderFinding.SOUND

    contents.check_run = trust


FAULTS: dict[str, Callable[[], None]] = {
    "down": lambda: _spoil_store(Down),
    "poisoned": lambda: _trust_spoiled_store(Poisoned),
    "half a load": _fail_a_load_half_way,
    "trusting": _trust_every_byte,
}


def afflict(fault: str) -> None:
    FAULTS[fault]()
