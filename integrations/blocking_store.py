"""A store for callers without an event loop: one on a thread, which owns the backend."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from ..errors import ConfigError, StorageError
from ..storage_backends.base import StorageBackend
from ..storage_backends.complaints import Trouble
from ..storage_backends.registry import make_backend
from ..storage_backends.uri import without_secrets

LATE_S: Final = 1.0
"""A call that is so much later than its deadline does not keep the contract (S2), and is named."""

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class BlockingStore:
    """One store, called from any thread.

    A call returns what the backend returns, and no sooner than the backend does: until then it may
    touch the caller's buffers (contract S3).
    """

    def __init__(
        self,
        uri: str,
        engine: str,
        around: Callable[[StorageBackend], StorageBackend] | None = None,
    ) -> None:
        """Raises `ConfigError` for a URI that makes no sense. Nothing is opened yet.

        `engine` is who waits for answers, for the log; `around` is what stands before the store.
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
        self._late = Trouble(_log)
        self._thread: threading.Thread | None = None

    def open(
        self,
        memory: Sequence[memoryview],
        timeout_s: float,
        *,
        close_timeout_s: float | None = None,
    ) -> None:
        """Open the backend, once; raises what keeps it from opening, or that it took too long.

        What runs when it is closed has as long to end, or `close_timeout_s`.
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
                f"the store {self.shown} did not open within {timeout_s:g} s; check that it can be"
                " reached, or give it more time (open_timeout_s)"
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
        """Return what a use of the backend comes to, which is to be done by `deadline`.

        `leaves` is for uses without buffers: they are not waited for any longer. Raises `StorageError`
        where they are left, or the store is not open, and whatever the use raises.
        """
        answer = self.begin(use)
        done, _ = wait([answer], max(0.0, deadline - time.monotonic()) + LATE_S)
        if done:
            return answer.result()
        self._late.warn(
            "a call to the store %s has no answer %g s after its deadline, and %s waits for it;"
            " look at the store",
            self.shown,
            LATE_S,
            self._engine,
        )
        if leaves:
            answer.cancel()
            raise StorageError("the store does not answer; look at it")
        return answer.result()

    def begin(
        self, use: Callable[[StorageBackend], Coroutine[Any, Any, Answer]]
    ) -> "Future[Answer]":
        """Begin a use of the backend, which nobody waits for here.

        Raises `StorageError` where the store is not open.
        """
        with self._lock:
            if not self._is_open or self._loop is None:
                raise StorageError("the store is not open; attach it again")
            return asyncio.run_coroutine_threadsafe(use(self._backend), self._loop)

    def close(self) -> None:
        """Close the backend, when what runs has ended or its time is up. Idempotent."""
        self._stop()
        thread = self._thread
        if thread is None:
            return
        thread.join(2 * self._close_timeout_s)
        if thread.is_alive():
            _log.warning("the store %s did not close; what it holds is left to it", self.shown)

    def _stop(self) -> None:
        with self._lock:
            # Whatever was begun before stands before this in the loop's queue, and is waited for.
            self._is_open = False
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stopping.set)

    def _run(self, loop: asyncio.AbstractEventLoop, memory: Sequence[memoryview]) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(self._live(memory))
            except BaseException as error:  # noqa: BLE001 - whoever waits for `open` must hear of it.
                if not self._opened.done():
                    self._opened.set_exception(error)
                    return
                _log.exception("the thread of the store %s has ended", self.shown)
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
        except Exception:  # noqa: BLE001 - the engine ends or goes on without the store all the same.
            _log.exception("the store did not close cleanly")
