"""Helpers for tests of `3fs://`: a store in a directory, with access to its index and slots."""

import asyncio
import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.error_log import ErrorLog
from lockstep.storage_backends.three_fs.backend import ThreeFsBackend
from lockstep.storage_backends.three_fs.page_index import (
    NOTHING,
    Commit,
    CommitOutcome,
    Entry,
    PageIndex,
    Reservation,
)
from lockstep.storage_backends.three_fs.sizes import ThreeFsOptions
from lockstep.storage_backends.three_fs.transfers import Transfers
from lockstep.storage_backends.three_fs.usrbio import UsrbioTransfers, choose_transfers
from tests.kit.storage.calls import HEALTHY_S, digest_of, using
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn

MakeTransfers = Callable[[Path, int, ErrorLog], Transfers]
SLOT_BYTES = (1 << 20) + (512 << 10)
FILE_SLOTS = 16
FILES = 64


class SlotStore:
    def __init__(
        self,
        root: Path,
        index: Path,
        *,
        slot_bytes: int = SLOT_BYTES,
        file_slots: int = FILE_SLOTS,
        files: int = FILES,
        make_transfers: MakeTransfers = choose_transfers,
    ) -> None:
        self.root = root
        self.index = index
        self.slot_bytes = slot_bytes
        self.file_slots = file_slots
        self.files = files
        self._make_transfers = make_transfers

    def make_index(self) -> PageIndex:
        return PageIndex(self.index)

    def backend(self, index: PageIndex | None = None, *, lease_s: float = 60.0) -> ThreeFsBackend:
        return ThreeFsBackend(
            self.root,
            self.make_index() if index is None else index,
            ThreeFsOptions(
                slot_bytes=self.slot_bytes, file_slots=self.file_slots, files=self.files, rings=3
            ),
            lease_s=lease_s,
            make_transfers=self._make_transfers,
        )

    def opened_index(self) -> PageIndex:
        index = self.make_index()
        index.open()
        return index

    def entry(self, name: ObjectName) -> Entry:
        index = self.opened_index()
        (entry,) = index.look_up([digest_of(name)])
        index.close()
        assert entry is not None
        return entry

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        entry = self.entry(name)
        with (self.root / entry.place).open("r+b") as file:
            file.seek(entry.offset + HEADER_BYTES + at)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 8]))

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        """Copy the object `name` with its header to another slot; index the copy as `other`."""
        entry = self.entry(name)
        index = self.opened_index()
        index.remove([digest_of(other)])
        (lent,) = index.reserve(1, 60.0)
        number, within = divmod(lent.slot, self.file_slots)
        place, offset = f"slots-{number:06d}", within * self.slot_bytes
        with (self.root / entry.place).open("r+b") as file:
            content = os.pread(file.fileno(), self.slot_bytes, entry.offset)
        with (self.root / place).open("r+b") as file:
            os.pwrite(file.fileno(), content, offset)
        moved = entry._replace(
            key=digest_of(other), place=place, offset=offset, generation=lent.generation
        )
        assert index.commit([Commit(moved, lent.slot, NOTHING)]) == [CommitOutcome.DONE]
        index.close()

    def end_leases(self) -> None:
        """Expire every lease of the index."""
        alter(self.index, "UPDATE slots SET lent_until = 1 WHERE lent_until > 0")

    def clean(self) -> None:
        """Delete the store's directory with its large files."""
        shutil.rmtree(self.root, ignore_errors=True)


def small_store(tmp_path: Path, index: Path | None = None, **options: Any) -> SlotStore:
    """Return a store with two files of four slots each, for pages of 16 KiB."""
    options = {"slot_bytes": 32 << 10, "file_slots": 4, "files": 2} | options
    return SlotStore(tmp_path / "store", index or tmp_path / "index.db", **options)


def over_usrbio(stand_in: UsrbioStandIn) -> MakeTransfers:
    """Return a factory of transfers. The transfers use a substitute for 3FS's client."""
    return lambda _, slot_bytes, complaints: UsrbioTransfers(
        stand_in, "/mnt/3fs", slot_bytes, complaints
    )


def alter(index: Path, *statements: str) -> None:
    """Run SQL statements on an index file, to create states that a store never creates."""
    with closing(sqlite3.connect(index)) as database:
        database.executescript(";".join(statements))


class WatchedIndex(PageIndex):
    """An index for tests, which counts look-ups and can block calls.

    `meanwhile` is called once, at the start of the next `confirm`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.questions: list[int] = []
        self.late_answer: Entry | None = None
        """If set, the next look-up returns this entry instead of the index's current entry."""
        self.meanwhile: Callable[[], None] | None = None
        self._held_method = ""
        self._begun = threading.Event()
        self._let_go = threading.Event()
        self._released = threading.Event()

    @contextmanager
    def holding(self, method: str) -> Generator[None]:
        """Block the calls of one method of the index until the block ends."""
        self._held_method = method
        try:
            yield
        finally:
            self._held_method = ""
            self._let_go.set()

    async def held(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, HEALTHY_S)

    async def released(self) -> None:
        assert await asyncio.to_thread(self._released.wait, HEALTHY_S)

    def _pass(self, method: str) -> None:
        if self._held_method == method:
            self._begun.set()
            assert self._let_go.wait(2 * HEALTHY_S)

    def look_up(self, keys: Sequence[bytes]) -> list[Entry | None]:
        self._pass("look_up")
        self.questions.append(len(keys))
        late, self.late_answer = self.late_answer, None
        if late is not None:
            return [late]
        return super().look_up(keys)

    def confirm(self, keys: Sequence[bytes]) -> list[Entry | None]:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self._pass("confirm")
        return super().confirm(keys)

    def reserve(self, count: int, lease_s: float) -> list[Reservation]:
        self._pass("reserve")
        return super().reserve(count, lease_s)

    def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        self._pass("commit")
        return super().commit(commits)

    def release(self, reservations: Sequence[Reservation]) -> None:
        super().release(reservations)
        self._released.set()

    def remove(self, keys: Sequence[bytes]) -> None:
        self._pass("remove")
        super().remove(keys)


@asynccontextmanager
async def watched(store: SlotStore) -> AsyncGenerator[tuple[ThreeFsBackend, WatchedIndex]]:
    """Open the store with a `WatchedIndex` for the block; yield the backend and the index."""
    index = WatchedIndex(store.index)
    async with using(store.backend(index)) as backend:
        yield backend, index
