"""The requests of a group, in the store in which its ranks have met.

Rank 0 writes each under its number. Another rank reads what it hears of in a verdict, on a thread of
its own: nobody polls, and a store that does not answer holds no step.
"""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

from ....coordinator.collective import CommonStore
from ....errors import LockstepError, UsageError
from ..member.request_log import RequestLog

_AGAIN_S: Final = 1.0
"""How long a rank does not ask a store again that has not answered."""

log = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """How much of requests may wait for the ranks (rule R10)."""

    bytes_each: int = 7 << 20
    """torch's store cuts off who gives it more than 8 MiB. A prompt of a million tokens has 5 MB."""
    count: int = 4096
    bytes: int = 64 << 20


class StoredRequests(RequestLog):
    """See `RequestLog`. Rank 0 submits, and the others have what it has submitted."""

    def __init__(
        self,
        store: CommonStore,
        *,
        bounds: RequestBounds | None = None,
        again_s: float = _AGAIN_S,
    ) -> None:
        """`store` is of this start of the group alone, the same on every rank."""
        super().__init__()
        self._store = store
        self._bounds = bounds or RequestBounds()
        self._submitting = threading.Lock()
        self._waiting_bytes: dict[int, int] = {}
        """Of the requests that are in the store."""
        self._wanted = 0
        self._reading = threading.Lock()
        self._again_s = again_s
        self._asks_again = 0.0

    def submit(self, content: bytes) -> int:
        """Take a request; return its number. For rank 0, and for any thread but the engine's.

        Raises `UsageError` for one that exceeds a bound, and `LockstepError` where the store fails;
        either way nothing has changed.
        """
        with self._submitting:
            try:
                self._forget()
                self._require_room(content)
                number = self.count + 1
                self._store.set(str(number), content)
            except (OSError, RuntimeError) as error:
                raise LockstepError(
                    f"the store in which the ranks have met does not take the request: {error}"
                ) from error
            self._waiting_bytes[number] = len(content)
            self.note(number, content)
            return number

    def learn(self, newest: int) -> None:
        self._wanted = newest
        if time.monotonic() >= self._asks_again and self._reading.acquire(blocking=False):
            # A daemon: a store that does not answer keeps no process from ending.
            threading.Thread(target=self._read, name="lockstep-requests", daemon=True).start()

    def _read(self) -> None:
        try:
            while (number := self.count + 1) <= self._wanted:
                self.note(number, self._store.get(str(number)))
        except (OSError, RuntimeError, KeyError) as error:
            self._asks_again = time.monotonic() + self._again_s
            log.warning("request %d cannot be read yet: %s", self.count + 1, error)
        finally:
            self._reading.release()

    def _forget(self) -> None:
        """Delete what was carried out here, and so was read by every rank."""
        for number in [each for each in self._waiting_bytes if each <= self.gone]:
            self._store.delete_key(str(number))
            del self._waiting_bytes[number]

    def _require_room(self, content: bytes) -> None:
        bounds, waiting = self._bounds, self._waiting_bytes
        if len(content) > bounds.bytes_each:
            raise UsageError(
                f"a request of {len(content)} bytes, must be at most {bounds.bytes_each}"
            )
        if len(waiting) >= bounds.count:
            raise UsageError(f"{len(waiting)} requests wait, which is as many as may wait")
        if sum(waiting.values()) + len(content) > bounds.bytes:
            raise UsageError(
                f"{sum(waiting.values())} bytes of requests wait, and with {len(content)} more they"
                f" would be more than {bounds.bytes}"
            )
