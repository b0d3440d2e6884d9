"""The threads on which a rank copies: each does one job after the other, and says what it died of."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Job = TypeVar("Job")


def _nothing() -> None:
    pass


class CopyThread(Generic[Job]):
    """Does jobs in the order in which they come, from any threads, until it is told to end.

    A job that goes badly is for `work` to report. What it raises all the same ends the thread, as
    does what `at_start` raises, which the thread calls first; `trouble` says so from then on. `at_end`
    is called by the thread last, whatever ended it. It never keeps its process from ending.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        *,
        at_start: Callable[[], None] = _nothing,
        at_end: Callable[[], None] = _nothing,
    ) -> None:
        self._name = name
        self._work = work
        self._at_start = at_start
        self._at_end = at_end
        # Reentrant, unlike `queue.Queue`: `end` may be called by a signal that came during `put`.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have a job done; does not wait."""
        self._jobs.put(job)

    def trouble(self) -> str | None:
        """Say what the thread died of, or None: it lives, or ended as it was told."""
        return self._trouble

    def end(self) -> None:
        """Let the thread end after what was put before; does not wait."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; say whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            self._at_start()
            while (job := self._jobs.get()) is not None:
                self._work(job)
        except BaseException as error:  # noqa: BLE001 - whatever ended the thread, the rank must say so.
            self._trouble = f"the thread {self._name} has ended: {error!r}"
        finally:
            self._at_end()
