"""An event loop on a separate thread; `close` cancels every task that runs on the loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
"""Callback that runs on the event loop for each accepted connection."""

_OPENS_S = 10.0
"""Seconds to wait until a listening socket is open."""
_ENDS_S = 10.0
"""Seconds to wait for the thread to end. Only a blocked event loop takes longer."""


class LoopThread:
    """Runs coroutines on a separate thread for callers on other threads. Thread-safe.

    The thread is a daemon, so it does not keep the process from exiting.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._running = set[Future[Any]]()
        """Futures of running tasks, kept here because an event loop holds only weak references to
        tasks."""
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine and return its future at once. After `close`, that future is cancelled."""
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
        """Schedule `function` on the event loop and return True; return False after `close`."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function, *arguments)
            return not self._closed

    def close(self) -> None:
        """Cancel all tasks and wait for their end. Idempotent; not callable on the loop itself."""
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
    """Close the servers, cancel every other task of this event loop, and wait until all have ended."""
    # Close the servers after the event loop has stopped. By then every accepted connection has a
    # transport. An accepted connection without a transport would leak its socket.
    for server in servers:
        server.close()
    # Let the event loop iterate once, so that it creates the tasks of connections that it has just
    # accepted.
    await asyncio.sleep(0)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Let the event loop iterate twice: callbacks of finished tasks run in the first iteration, and
        # connections that these callbacks abort close their sockets in the second.
        for _ in range(2):
            await asyncio.sleep(0)
