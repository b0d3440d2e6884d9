"""The requests of a group, encrypted, in the store in which its ranks have met.

Rank 0 writes each under its number. Another rank reads what it hears of in a verdict, on a thread of
its own: nobody polls, and a store that does not answer holds no step. The store knows no secret, so
requests are encrypted (AES-256-GCM) by a key of the ranks, with their number as associated data. One
that was changed or moved is not there yet: no rank carries it out before rank 0 has written it anew.
A rank that cannot read one leaves a mark in the store, because of which rank 0 does so with the next
request.
"""

import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ....coordinator.collective import CommonStore
from ....errors import LockstepError, UsageError
from ..member.request_log import RequestLog

_AGAIN_S: Final = 1.0
"""How long a rank does not ask a store again that has not answered, and how long its end waits."""
KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_UNREAD: Final = "unread"
"""The key of the mark that some rank could not read a request."""

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
        key: bytes,
        *,
        bounds: RequestBounds | None = None,
        again_s: float = _AGAIN_S,
    ) -> None:
        """`store` and `key` are of this start of the group alone, the same on every rank."""
        super().__init__()
        self._store = store
        self._cipher = AESGCM(key)
        self._bounds = bounds or RequestBounds()
        self._submitting = threading.RLock()
        self._sealed: dict[int, bytes] = {}
        """The requests that are in the store, as they are there."""
        self._closed = False
        self._wanted = 0
        self._reading = threading.Lock()
        self._again_s = again_s
        self._asks_again = 0.0

    def submit(self, content: bytes) -> int:
        """Take a request; return its number. For rank 0, and for any thread but the engine's.

        Raises `UsageError` for one that exceeds a bound, and `LockstepError` where the store fails or
        this was closed; in each case nothing has changed.
        """
        with self._submitting:
            if self._closed:
                raise LockstepError("the group has ended before it was done")
            number = self.count + 1
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sealed = nonce + self._cipher.encrypt(nonce, content, str(number).encode())
            try:
                self._forget()
                self._require_room(content)
                if self._store.delete_key(_UNREAD):
                    for each, kept in self._sealed.items():
                        self._store.set(str(each), kept)
                self._store.set(str(number), sealed)
            except (OSError, RuntimeError) as error:
                raise LockstepError(
                    f"the store in which the ranks have met does not take the request: {error}"
                ) from error
            self._sealed[number] = sealed
            self.note(number, content)
            return number

    def close(self) -> None:
        """Take no more requests, and delete those that are in the store, if it answers in time."""
        self._closed = True
        last = threading.Thread(target=self._forget, name="lockstep-requests", daemon=True)
        # Where no thread can be started, as at the end of the interpreter, they stay, encrypted.
        with suppress(RuntimeError):
            last.start()
            last.join(self._again_s)

    def learn(self, newest: int) -> None:
        self._wanted = newest
        if time.monotonic() >= self._asks_again and self._reading.acquire(blocking=False):
            # A daemon: a store that does not answer keeps no process from ending.
            reader = threading.Thread(target=self._read, name="lockstep-requests", daemon=True)
            try:
                reader.start()
            except RuntimeError as error:
                self._retry_later(error)
                self._reading.release()

    def _read(self) -> None:
        try:
            while (number := self.count + 1) <= self._wanted:
                sealed = bytes(self._store.get(str(number))).ljust(_NONCE_BYTES)
                nonce, encrypted = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
                self.note(number, self._cipher.decrypt(nonce, encrypted, str(number).encode()))
        except (OSError, RuntimeError, KeyError, InvalidTag) as error:
            # It is tried again, and marked again, if the mark is lost.
            with suppress(OSError, RuntimeError):
                self._store.set(_UNREAD, b"")
            self._retry_later(error)
        finally:
            self._reading.release()

    def _retry_later(self, error: Exception) -> None:
        self._asks_again = time.monotonic() + self._again_s
        why = str(error) or "it is not what rank 0 has written"
        log.warning("request %d cannot be read yet: %s", self.count + 1, why)

    def _forget(self) -> None:
        """Delete what was carried out here, and so was read by every rank; at the end delete all."""
        with self._submitting, suppress(OSError, RuntimeError):
            for number in [each for each in self._sealed if self._closed or each <= self.gone]:
                self._store.delete_key(str(number))
                del self._sealed[number]

    def _require_room(self, content: bytes) -> None:
        bounds, waiting = self._bounds, self._sealed
        waiting_bytes = sum(map(len, waiting.values()))
        if len(content) > bounds.bytes_each:
            raise UsageError(
                f"a request of {len(content)} bytes, must be at most {bounds.bytes_each}"
            )
        if len(waiting) >= bounds.count:
            raise UsageError(f"{len(waiting)} requests wait, which is as many as may wait")
        if waiting_bytes + len(content) > bounds.bytes:
            raise UsageError(
                f"{waiting_bytes} bytes of requests wait, and with {len(content)} more they would be"
                f" more than {bounds.bytes}"
            )
