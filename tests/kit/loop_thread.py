"""An event loop on a thread of its own, which ends with all that runs on it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
"""What is called on the loop with each connection that is accepted."""

_OPENS_S = 10.0
"""How long a listening socket may take to be opened."""
_ENDS_S = 10.0
"""What only a loop takes that a callback holds."""


class LoopThread:
    """Runs coroutines for other threads, which do not wait unless they want to. Thread-safe.

    The thread is a daemon: it keeps no process from ending.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._running = set[Future[Any]]()
        """A loop holds no task strongly, so one that nobody waits for could be collected."""
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin a coroutine and return at once. After `close` the future is cancelled."""
        with self._lock:
            if not self._closed:
                begun = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._running.add(begun)
                begun.add_done_callback(self._running.discard)
                return begun
        work.close()
        ended = Future[Result]()
        ended.cancel()
        return ended

    def listen(self, accept: Accept, host: str, port: int) -> int:
        """Listen on TCP until `close`; return the port. Raises `OSError` or `TimeoutError`."""
        return self.start(self._listen(accept, host, port)).result(_OPENS_S)

    def call(self, function: Callable[..., object], *arguments: object) -> bool:
        """Have a function called on the loop; False, and it is not, after `close`."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function, *arguments)
            return not self._closed

    def close(self) -> None:
        """Cancel all that runs, and wait until it has ended. Idempotent; not for the loop itself."""
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ENDS_S)

    async def _listen(self, accept: Accept, host: str, port: int) -> int:
        server = await asyncio.start_server(accept, host, port)
        self._servers.append(server)
        own_port: int = server.sockets[0].getsockname()[1]
        return own_port

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end(self._servers))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


async def _end(servers: list[asyncio.Server]) -> None:
    """Listen no more, cancel every other task of this loop, and wait for its end."""
    # Each connection that was accepted has its transport by now. A server that is closed before that
    # leaves the connection's socket open.
    for server in servers:
        server.close()
    # A connection that was just accepted begins its task in the loop's next turn.
    await asyncio.sleep(0)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The end of a task calls back in the next turn; a connection aborted there closes its socket
        # in the one after.
        for _ in range(2):
            await asyncio.sleep(0)
