"""Batched reads of whole objects: a bad object costs only its own read."""

import asyncio
import os
import threading

import pytest

from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend
from lockstep.storage_backends.file import backend as file_backend
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.storage.calls import (
    HEALTHY_S,
    found,
    get_many,
    object_name,
    opened,
    page,
    put_many,
    soon,
    soon_off_loop,
    turns,
)
from tests.kit.storage.files import FileStore, descriptors_open, failing, files_open_below

MANY = range(150)
"""Object numbers, more than fit into one group of batched reads."""


def spoil(store: FileStore) -> dict[int, ReadOutcome]:
    """Damage some objects in every possible way; return the expected outcome of each object's read."""
    store.spoil(object_name(3))
    store.path(object_name(10)).unlink()
    store.path(object_name(70)).write_bytes(b"")
    store.path(object_name(71)).write_bytes(store.path(object_name(71)).read_bytes()[:-1])
    store.path(object_name(72)).write_bytes(store.path(object_name(72)).read_bytes() + b"\0")
    store.pass_off(object_name(5), object_name(149))
    store.path(object_name(100)).unlink()
    os.mkfifo(store.path(object_name(100)))
    corrupt = dict.fromkeys((3, 70, 71, 72, 100, 149), ReadOutcome.CORRUPT)
    return corrupt | {10: ReadOutcome.MISSING}


async def test_what_is_bad_among_many_costs_itself_alone(store: FileStore) -> None:
    async with opened(store) as backend:
        await put_many(backend, MANY)
    bad = spoil(store)

    async with opened(store) as backend:
        results = await get_many(backend, MANY)

    assert {
        at: outcome for at, (outcome, _) in enumerate(results) if outcome is not ReadOutcome.OK
    } == bad
    assert [each for at, each in enumerate(results) if at not in bad] == [
        each for at, each in enumerate(found(MANY)) if at not in bad
    ]
    assert len(store.quarantined()) == 6


@pytest.mark.parametrize("function", ["open", "preadv"])
async def test_no_descriptor_stays_open_whatever_fails(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    async with opened(store) as backend:
        await put_many(backend, MANY)
        before = descriptors_open()
        with monkeypatch.context() as patched:
            patched.setattr(os, function, failing())
            results = await get_many(backend, MANY)

        assert {outcome for outcome, _ in results} == {ReadOutcome.FAILED}
        assert descriptors_open() == before
        assert await get_many(backend, MANY) == found(MANY)


def test_a_group_that_is_stopped_opens_no_further_file(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, opened_files, real_open = Stop(soon_off_loop()), list[str](), os.open
    shape = ObjectShape.whole(len(page(0)))
    reads = [Read(object_name(n), (memoryview(page(0)),), shape) for n in range(20)]

    def open_and_stop(path: str, *arguments: int, **named: int) -> int:
        opened_files.append(path)
        stop.requested = len(opened_files) == 5
        return real_open(path, *arguments, **named)

    with store.files() as files:
        wrote = {files.write(each.name, [memoryview(page(0))], shape, stop) for each in reads}
        monkeypatch.setattr(os, "open", open_and_stop)
        outcomes = files.read_all(reads, stop)

    assert len(wrote) == 1
    assert len(opened_files) == 5
    assert outcomes == [ReadOutcome.OK] * 5 + [ReadOutcome.TIMED_OUT] * 15
    assert files_open_below(store.root) == []


class SlowLooks:
    """Stand-in for `os.access`: each check releases `entered`, and blocks until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.entered = threading.Semaphore(0)
        monkeypatch.setattr(os, "access", self._look)

    def _look(self, *_: object, **__: object) -> bool:
        self.entered.release()
        assert self.go_on.wait(HEALTHY_S)
        return True


async def ask(backend: StorageBackend, number: int, deadline: float) -> list[bool]:
    return await backend.exists([object_name(number)], deadline=deadline)


async def test_quick_looks_are_made_one_call_after_the_other(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_backend, "_LOOK_TURN_S", HEALTHY_S)
    async with opened(store) as backend:
        looks = SlowLooks(monkeypatch)
        first = asyncio.create_task(ask(backend, 1, soon()))
        assert await asyncio.to_thread(looks.entered.acquire, timeout=HEALTHY_S)
        second = asyncio.create_task(ask(backend, 2, soon()))

        await turns()
        others_entered = looks.entered.acquire(blocking=False)
        looks.go_on.set()

        assert not others_entered
        assert await first == await second == [True]


async def test_a_look_that_lasts_makes_nobody_else_miss(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as backend:
        looks = SlowLooks(monkeypatch)
        both = [asyncio.create_task(ask(backend, number, soon())) for number in (1, 2)]

        entered = [await asyncio.to_thread(looks.entered.acquire, timeout=HEALTHY_S) for _ in both]
        looks.go_on.set()

        assert entered == [True, True]
        assert [await each for each in both] == [[True], [True]]


async def test_a_look_that_was_cancelled_while_it_waited_holds_up_nobody(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_backend, "_LOOK_TURN_S", HEALTHY_S)
    async with opened(store) as backend:
        looks = SlowLooks(monkeypatch)
        first = asyncio.create_task(ask(backend, 1, soon()))
        assert await asyncio.to_thread(looks.entered.acquire, timeout=HEALTHY_S)
        waiting = asyncio.create_task(ask(backend, 2, soon()))
        await turns()
        waiting.cancel()
        looks.go_on.set()

        assert await first == [True]
        assert await ask(backend, 3, soon()) == [True]
        assert waiting.cancelled()


async def test_looks_that_last_are_made_side_by_side(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as backend:
        monkeypatch.setattr(file_backend, "_LOOK_TURN_S", HEALTHY_S)
        monkeypatch.setattr(file_backend, "_LONG_LOOK_S", 0.0)
        names = [object_name(number) for number in range(100, 150)]
        assert await backend.exists(names, deadline=soon()) == [False] * 50
        looks = SlowLooks(monkeypatch)
        both = [asyncio.create_task(ask(backend, number, soon())) for number in (1, 2)]

        entered = [await asyncio.to_thread(looks.entered.acquire, timeout=HEALTHY_S) for _ in both]
        looks.go_on.set()

        assert entered == [True, True]
        assert [await each for each in both] == [[True], [True]]
