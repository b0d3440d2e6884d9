"""Checks that no test leaks a running storage thread or pending tasks of a closed event loop.

Without this check a leaked task would be reported much later, when the garbage collector finds it
during another test.
"""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager

LOOP = "lockstep-storage"
"""Name of the thread that runs a store's event loop."""
LEAVES_S = 30.0
"""Seconds to wait for a storage thread to end. Only a hung thread takes longer."""


@contextmanager
def nothing_left_behind() -> Generator[None]:
    """Fail if a storage thread of the block still runs, or a closed event loop had pending tasks."""
    before = set(threading.enumerate())
    with tasks_of_closed_loops() as tasks:
        yield
        begun = [each for each in threading.enumerate() if each.name == LOOP and each not in before]
        for thread in begun:
            thread.join(LEAVES_S)
    going_on = [thread for thread in begun if thread.is_alive()]
    assert not going_on, f"{len(going_on)} stores were not closed, or let a call go on for ever"
    assert not tasks, f"an event loop was closed, and did not end first: {'; '.join(tasks)}"


@contextmanager
def tasks_of_closed_loops() -> Generator[list[str]]:
    """Yield a list that collects the tasks that are pending when their event loop is closed."""
    tasks: list[str] = []
    close = asyncio.BaseEventLoop.close

    def look_and_close(self: asyncio.BaseEventLoop) -> None:
        tasks.extend(repr(each) for each in asyncio.all_tasks(self))
        close(self)

    asyncio.BaseEventLoop.close = look_and_close  # type: ignore[method-assign] # Patch asyncio.
    try:
        yield tasks
    finally:
        asyncio.BaseEventLoop.close = close  # type: ignore[method-assign] # Restore asyncio.
