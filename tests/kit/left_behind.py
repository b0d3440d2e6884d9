"""What no test may leave behind: a store's loop that goes on, and tasks in a loop that was closed.

Either would be seen much later, and in another test: a task that nobody has ended is logged when the
garbage collector finds it.
"""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager

LOOP = "lockstep-storage"
"""What the thread of a store's loop is called."""
LEAVES_S = 30.0
"""What only a thread takes that does not end."""


@contextmanager
def nothing_left_behind() -> Generator[None]:
    """Fail for a store's loop that was begun meanwhile and goes on, and for one closed over tasks."""
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
    """Collect what is still to be done when its event loop is closed."""
    tasks: list[str] = []
    close = asyncio.BaseEventLoop.close

    def look_and_close(self: asyncio.BaseEventLoop) -> None:
        tasks.extend(repr(each) for each in asyncio.all_tasks(self))
        close(self)

    asyncio.BaseEventLoop.close = look_and_close  # type: ignore[method-assign] # put back below.
    try:
        yield tasks
    finally:
        asyncio.BaseEventLoop.close = close  # type: ignore[method-assign] # as it was.
