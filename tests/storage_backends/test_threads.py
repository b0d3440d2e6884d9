"""Threads of `file://` that are blocked in the kernel."""

import asyncio
import subprocess
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from lockstep.errors import ConfigError, StorageError, UsageError
from lockstep.storage_backends import threaded_backend
from lockstep.storage_backends.base import ReadOutcome
from lockstep.storage_backends.file import backend as file
from lockstep.storage_backends.threaded_backend import DaemonThreads, Stop, ThreadCalls
from tests.kit.programs import program
from tests.kit.storage.calls import get, object_name, page, put, soon
from tests.kit.storage.files import FileStore, Gate, files_open_below

PROGRAM = "tests.kit.storage.hung"


others: set[threading.Thread] = set()
"""Threads that existed before the test; those of an earlier test may still be in a system call."""


@pytest.fixture(autouse=True)
def remember_others() -> Generator[None]:
    others.update(threading.enumerate())
    yield
    others.clear()


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("lockstep-file") and thread not in others:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_process_ends_after_close_though_the_kernel_never_gives_a_thread_back(
    store: FileStore, call: str
) -> None:
    command = program(PROGRAM, store.root, call)
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert ended.stdout == "closed\n"


@pytest.mark.parametrize("cancelled", [False, True], ids=["overrun", "cancelled"])
async def test_a_close_that_is_too_short_gives_everything_back_when_the_last_call_ends(
    store: FileStore, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded_backend, "CLOSE_TIMEOUT_S", 60.0 if cancelled else 0.05)

    backend = store.backend()
    await backend.open()
    await put(backend, object_name(1), page(1))
    gate = Gate(monkeypatch, "preadv")
    reading = asyncio.create_task(get(backend, object_name(1)))
    await gate.entered()
    closing = asyncio.create_task(backend.close())
    await asyncio.wait([closing], timeout=0.01 if cancelled else 60)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled() == cancelled
    assert not reading.done()
    assert files_open_below(store.root)
    gate.open()
    assert (await reading)[0] is ReadOutcome.OK
    wait_for_threads()
    assert files_open_below(store.root) == []


async def test_an_open_that_is_too_late_is_refused_and_leaves_nothing_open(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_OPEN_TIMEOUT_S", 0.05)
    gate = Gate(monkeypatch, "link")

    backend = store.backend()
    with pytest.raises(ConfigError, match="did not answer within"):
        await backend.open()
    with pytest.raises(UsageError, match="make a new backend"):
        await backend.open()
    gate.open()
    wait_for_threads()
    assert files_open_below(store.root) == []


async def test_a_store_that_is_closed_while_it_opens_leaves_nothing_open(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "link")

    backend = store.backend()
    opening = asyncio.create_task(backend.open())
    await gate.entered()
    await backend.close()
    gate.open()
    with pytest.raises(UsageError, match="closed while it opened"):
        await opening
    wait_for_threads()
    assert files_open_below(store.root) == []


def test_threads_that_end_cancel_what_waits_and_the_last_one_to_leave_says_so_once() -> None:
    begun, go_on, at_end_calls = threading.Semaphore(0), threading.Event(), list[str]()

    def work() -> int:
        begun.release()
        assert go_on.wait(60)
        return 7

    threads = DaemonThreads(2, "lockstep-file", at_end=lambda: at_end_calls.append("end"))
    running = [threads.submit(work) for _ in range(2)]
    assert [begun.acquire(timeout=60) for _ in running] == [True, True]
    queued = threads.submit(work)
    ended = threads.end()
    assert threads.end() is ended
    assert queued.cancelled()
    with pytest.raises(RuntimeError, match="are stopping"):
        threads.submit(work)
    assert (at_end_calls, ended.done()) == ([], False)
    go_on.set()
    assert [each.result(60) for each in running] == [7, 7]
    ended.result(60)
    assert at_end_calls == ["end"]


@asynccontextmanager
async def one_thread_held() -> AsyncGenerator[ThreadCalls]:
    """`ThreadCalls` whose one thread is busy inside the context and is released at its exit."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(60)

    calls = ThreadCalls(1, "lockstep-file", at_end=lambda: None)
    running = asyncio.create_task(calls.once(work, 60))
    assert await asyncio.to_thread(begun.wait, 60)
    yield calls
    go_on.set()
    assert await calls.close(60)
    await running


async def test_a_call_that_never_began_is_cancelled_if_its_caller_is() -> None:
    async with one_thread_held() as calls:
        queued = asyncio.create_task(calls.once(lambda: None, 60))
        await asyncio.sleep(0)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued


async def test_a_call_that_never_began_says_that_the_store_was_closed() -> None:
    async with one_thread_held() as calls:
        queued = asyncio.create_task(calls.once(lambda: None, 60))
        await asyncio.sleep(0)
        closing = asyncio.create_task(calls.close(60))
        with pytest.raises(StorageError, match="closed before it answered"):
            await queued
    assert await closing


def test_threads_that_never_began_end_at_once() -> None:
    at_end_calls = list[str]()
    DaemonThreads(2, "lockstep-file", at_end=lambda: at_end_calls.append("end")).end().result(0)
    assert at_end_calls == ["end"]


async def test_the_loop_is_woken_once_for_all_jobs_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of many jobs wakes the event loop only once, because a wakeup pauses all threads."""
    loop, woken = asyncio.get_running_loop(), list[object]()
    wake = loop.call_soon_threadsafe

    def count(*arguments: Any, **named: Any) -> asyncio.Handle:
        woken.append(arguments)
        return wake(*arguments, **named)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    calls = ThreadCalls(4, "jobs", at_end=lambda: None)

    doubled = await calls.run(
        lambda items, _: [2 * each for each in items],
        range(8),
        weights=[1] * 8,
        job_weight_min=1,
        late=-1,
        deadline=soon(),
    )

    assert doubled == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(woken) == 1
    assert await calls.close(60)


async def test_a_job_that_raises_is_raised_in_its_call_once_all_jobs_have_ended() -> None:
    ended = threading.Semaphore(0)
    calls = ThreadCalls(2, "jobs", at_end=lambda: None)

    def divide(items: Sequence[int], _: Stop) -> list[int]:
        with ExitStack() as at_end:
            at_end.callback(ended.release)
            return [1 // each for each in items]

    with pytest.raises(ZeroDivisionError):
        await calls.run(divide, [0, 1], weights=[1, 1], job_weight_min=1, late=-1, deadline=soon())

    assert [ended.acquire(blocking=False) for _ in range(3)] == [True, True, False]
    assert await calls.close(60)
