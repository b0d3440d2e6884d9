"""Bounded stores evict the unused ends of prefixes before their roots."""

import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import After, StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from lockstep.storage_backends.file.sweeper import Sweeper
from tests.kit.storage.calls import get_many, object_name, page, soon, using
from tests.kit.storage.files import sweeper_of
from tests.kit.storage.three_fs import SlotStore

SIZE = 4 << 10
ROOM = 2 * SIZE
"""Size in bytes of an object's file, header included."""
OBJECTS_MAX = 64
PAGES = 240

Bounded = Callable[[], AbstractAsyncContextManager[StorageBackend]]
"""Opens an empty store with room for `OBJECTS_MAX` objects."""


class Prefixes:
    """A random tree of numbered pages from which prompts are drawn."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.before: dict[int, int | None] = {}
        """The page before each page; None for the first page of a prompt."""
        for number in range(PAGES):
            begins = number == 0 or self._draw.random() < 0.03
            self.before[number] = (
                None if begins else self._draw.randrange(max(0, number - 12), number)
            )

    def path(self, number: int) -> list[int]:
        above = self.before[number]
        return [number] if above is None else [*self.path(above), number]

    def prompts(self, count: int) -> Iterator[tuple[list[int], int]]:
        """Yield each prompt with the index of its first page to write.

        The index is that of the last page if the page before it was used recently, else 0.
        """
        recent: deque[int] = deque(maxlen=3)
        for _ in range(count):
            path = self.path(self._draw.randrange(PAGES))
            yield path, len(path) - 1 if path[-2:-1] and path[-2] in recent else 0
            recent.append(path[-1])
            # The next turn of the same chat: the prompt with one more page.
            more = [each for each, before in self.before.items() if before == path[-1]]
            if more:
                yield [*path, more[0]], len(path)


async def serve(backend: StorageBackend, path: list[int], first: int) -> None:
    after = After(object_name(path[first - 1])) if first else None
    writes = [
        Write(object_name(each), (memoryview(page(each, SIZE)),), ObjectShape.whole(SIZE), after)
        for each in path[first:]
    ]
    outcomes = await backend.write(writes, deadline=soon())
    assert set(outcomes) <= {WriteOutcome.OK, WriteOutcome.PRESENT}


async def kept_by(backend: StorageBackend) -> set[int]:
    return {int(stored.name.key, 16) async for stored in backend.objects()}


def no_passes(sweeper: Sweeper) -> None:
    """Replaces `Sweeper.start` by nothing, because the test runs the sweeps itself."""


@pytest.fixture(params=["file", "3fs"])
def bounded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bounded:
    if request.param == "3fs":
        store = SlotStore(
            tmp_path, tmp_path / "i.db", slot_bytes=5 * SIZE, file_slots=OBJECTS_MAX, files=1
        )
        return lambda: using(store.backend())
    monkeypatch.setattr(Sweeper, "start", no_passes)
    options = FileOptions(quota_bytes=OBJECTS_MAX * ROOM)
    return lambda: using(FileBackend(tmp_path / "kv", options))


def give_way(backend: StorageBackend) -> None:
    """Sweep a file store, as its thread would. A 3FS store evicts by itself when it needs slots."""
    if isinstance(backend, FileBackend):
        sweeper_of(backend).turn(wanted=True)


@asynccontextmanager
async def used(bounded: Bounded, prefixes: Prefixes) -> AsyncGenerator[StorageBackend]:
    """A full store that has served many prompts."""
    async with bounded() as backend:
        for path, first in prefixes.prompts(80):
            await serve(backend, path, first)
            give_way(backend)
        yield backend


@pytest.mark.parametrize("seed", range(10))
async def test_no_page_is_taken_away_before_one_that_continues_it(
    bounded: Bounded, seed: int
) -> None:
    prefixes = Prefixes(seed)

    async with used(bounded, prefixes) as backend:
        kept = await kept_by(backend)

    orphans = {each for each in kept if not set(prefixes.path(each)) <= kept}
    assert orphans == set()
    assert 0 < len(kept) < PAGES


async def test_what_was_written_again_last_is_there_however_long_ago_it_was_first_written(
    bounded: Bounded,
) -> None:
    system = list(range(30))

    async with bounded() as backend:
        await serve(backend, system, 0)
        for number in range(100, 200, 10):
            await serve(backend, [*system, *range(number, number + 10)], 0)
            give_way(backend)
        found = await get_many(backend, system, SIZE)

    assert {outcome.name for outcome, _ in found} == {"OK"}


async def test_reading_a_prefix_lets_its_end_leave_first(bounded: Bounded) -> None:
    prompt = list(range(20))
    async with bounded() as backend:
        await serve(backend, prompt, 0)
        await get_many(backend, prompt, SIZE)
        for number in range(100, 152):
            await serve(backend, [number], 0)
            give_way(backend)
        kept = {each for each in await kept_by(backend) if each < len(prompt)}

    assert kept == set(range(len(kept)))
    assert 0 < len(kept) < len(prompt)
