"""Lets threads without an event loop call a storage backend; the backend runs in its own thread."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from ..errors import ConfigError, StorageError
from ..storage_backends.base import StorageBackend
from ..storage_backends.error_log import LoggedError
from ..storage_backends.registry import make_backend
from ..storage_backends.uri import without_secrets

LATE_S: Final = 1.0
"""A call still running this many seconds after its deadline is logged as a violation of store contract
S2."""

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class BlockingStore:
    """A storage backend that can be called from any thread.

    A call returns only after the backend's call has returned, because until then the backend may access
    the caller's buffers (store contract S3).
    """

    def __init__(
        self,
        uri: str,
        engine: str,
        around: Callable[[StorageBackend], StorageBackend] | None = None,
    ) -> None:
        """Create the backend without opening it. Raise `ConfigError` if the URI is invalid.

        `engine` is the engine's name in log lines. `around` is a function that wraps the backend.
        """
        self.shown = without_secrets(uri)
        self._engine = engine
        backend = make_backend(uri)
        self._backend = backend if around is None else around(backend)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._stopping = asyncio.Event()
        self._is_open = False
        self._close_timeout_s = 0.0
        self._opened: Future[None] = Future()
        self._late = LoggedError(_log)
        self._thread: threading.Thread | None = None

    def open(
        self,
        memory: Sequence[memoryview],
        timeout_s: float,
        *,
        close_timeout_s: float | None = None,
    ) -> None:
        """Open the backend. Raise the backend's error, or `ConfigError` after `timeout_s` seconds.

        Call it only once. `close_timeout_s` limits how long `close` waits for running calls. The
        default is `timeout_s`.
        """
        self._close_timeout_s = timeout_s if close_timeout_s is None else close_timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, memory), name="lockstep-store", daemon=True
        )
        self._thread.start()
        wait([self._opened], timeout_s)
        if not self._opened.done():
            self._stop()
            raise ConfigError(
                f"the store {self.shown} did not open within {timeout_s:g} s; check that it is"
                " reachable, or raise open_timeout_s"
            )
        self._opened.result()
        self._is_open = True

    def call(
        self,
        use: Callable[[StorageBackend], Coroutine[Any, Any, Answer]],
        deadline: float,
        *,
        leaves: bool = False,
    ) -> Answer:
        """Call the backend, wait until the call has ended, and return its result.

        A call that runs longer than `deadline` is logged. If `leaves` is True, such a call is cancelled
        and raises `StorageError`; set `leaves` only for calls without buffers. Also raises
        `StorageError` if the store is not open.
        """
        answer = self.begin(use)
        done, _ = wait([answer], max(0.0, deadline - time.monotonic()) + LATE_S)
        if done:
            return answer.result()
        self._late.warn(
            "a call to the store %s has not returned %g s after its deadline, and %s is waiting for"
            " it; check the store",
            self.shown,
            LATE_S,
            self._engine,
        )
        if leaves:
            answer.cancel()
            raise StorageError("the store does not respond; check it")
        return answer.result()

    def begin(
        self, use: Callable[[StorageBackend], Coroutine[Any, Any, Answer]]
    ) -> "Future[Answer]":
        """Start a call to the backend and return its future without waiting.

        Raises `StorageError` if the store is not open.
        """
        with self._lock:
            if not self._is_open or self._loop is None:
                raise StorageError("the store is not open; attach it again")
            return asyncio.run_coroutine_threadsafe(use(self._backend), self._loop)

    def close(self) -> None:
        """Close the backend after running calls have finished or timed out. Idempotent."""
        self._stop()
        thread = self._thread
        if thread is None:
            return
        thread.join(2 * self._close_timeout_s)
        if thread.is_alive():
            _log.warning(
                "the store %s did not close in time; its resources are not freed", self.shown
            )

    def _stop(self) -> None:
        with self._lock:
            # Calls that were submitted before the store was stopped still complete, because the event
            # loop runs callbacks in the order in which they were added.
            self._is_open = False
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stopping.set)

    def _run(self, loop: asyncio.AbstractEventLoop, memory: Sequence[memoryview]) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(self._live(memory))
            except BaseException as error:  # noqa: BLE001 - `open` re-raises every error.
                if not self._opened.done():
                    self._opened.set_exception(error)
                    return
                _log.exception("the thread of the store %s failed", self.shown)
            finally:
                with self._lock:
                    self._is_open = False

    async def _live(self, memory: Sequence[memoryview]) -> None:
        await self._backend.open(memory)
        self._opened.set_result(None)
        await self._stopping.wait()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        if running:
            await asyncio.wait(running, timeout=self._close_timeout_s)
        try:
            await asyncio.wait_for(self._backend.close(), self._close_timeout_s)
        except Exception:  # noqa: BLE001 - the engine continues without the store.
            _log.exception("the store did not close cleanly")
