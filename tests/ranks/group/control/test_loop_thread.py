"""An event loop on a thread: what is begun goes on, and ends with it."""

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from lockstep.ranks.group.control.loop_thread import LoopThread
from tests.kit.waiting import wait_for

PATIENCE_S = 30.0


@contextmanager
def closing_by(said: list[str]) -> Generator[None]:
    """Say that what is inside has ended, however it ends."""
    try:
        yield
    finally:
        said.append("ended")


def let_go_on(futures: list["weakref.ref[asyncio.Future[None]]"]) -> None:
    """Let those be done that are still there."""
    for each in filter(None, [ref() for ref in futures]):
        each.set_result(None)


def test_work_that_nobody_waits_for_is_not_collected() -> None:
    """A loop refers weakly to its tasks, and one that waits for itself alone was lost once."""
    loop = LoopThread("test")
    waits, went_on = threading.Event(), threading.Event()
    futures: list[weakref.ref[asyncio.Future[None]]] = []

    async def work() -> None:
        future = asyncio.get_running_loop().create_future()
        futures.append(weakref.ref(future))
        waits.set()
        await future
        went_on.set()

    loop.start(work())
    assert waits.wait(PATIENCE_S)
    gc.collect()
    loop.call(let_go_on, futures)

    assert went_on.wait(PATIENCE_S)
    loop.close()


def test_what_runs_is_cancelled_and_has_ended_when_the_loop_is_closed() -> None:
    loop = LoopThread("test")
    begun = threading.Event()
    said: list[str] = []

    async def work() -> None:
        with closing_by(said):
            begun.set()
            await asyncio.Event().wait()

    outcome = loop.start(work())
    assert begun.wait(PATIENCE_S)
    loop.close()

    assert (said, outcome.cancelled()) == (["ended"], True)


def test_nothing_is_begun_on_a_loop_that_was_closed() -> None:
    async def work() -> None:
        raise AssertionError

    loop = LoopThread("test")
    loop.close()
    loop.close()

    assert loop.start(work()).cancelled()
    assert not loop.call(pytest.fail, "it was called")


class Held:
    """Keeps a loop from going on."""

    def __init__(self, loop: LoopThread) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        loop.call(self._hold)

    def _hold(self) -> None:
        self.begun.set()
        self.let_go.wait(PATIENCE_S)


def test_a_connection_that_is_accepted_in_the_turn_before_the_loop_ends_is_closed() -> None:
    """A server that is closed between the two steps of accepting one leaves its socket open."""
    loop = LoopThread("test")
    port = loop.listen(lambda _, writer: writer.transport.abort(), "127.0.0.1", 0)
    before = Held(loop)
    assert before.begun.wait(PATIENCE_S)
    closing = threading.Thread(target=loop.close)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        # The turn after this one accepts the connection behind what is held there.
        accepting = Held(loop)
        before.let_go.set()
        assert accepting.begun.wait(PATIENCE_S)
        closing.start()
        wait_for(lambda: not loop.call(int))
        accepting.let_go.set()
        closing.join()

        assert client.recv(1) == b""
    gc.collect()
