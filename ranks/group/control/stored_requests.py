"""Passes control requests from rank 0 to the other ranks, encrypted, through their rendezvous store.

Rank 0 writes each control request under its number. Another rank learns the number from a verdict and
reads the control request on a separate thread, so a store that does not answer delays no step.

The store is not trusted, so control requests are encrypted with AES-256-GCM under a key that only the
ranks have, with the number as associated data. A control request that was modified, or stored under
another number, counts as missing. A rank that cannot read a control request writes a reserved key to
the store. When rank 0 finds this key, it writes all pending control requests again, together with the
next one.
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
"""Seconds that a rank waits after a failed read before it retries. Also the maximum time that `close`
waits for the deletion of control requests."""
KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_UNREAD: Final = "unread"
"""Store key that a rank writes when it could not read a control request."""

log = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """Limits on the control requests that some rank has not read yet (rule R10)."""

    bytes_each: int = 7 << 20
    """Maximum size of one control request in bytes. torch's store disconnects a client that sends more
    than 8 MiB at once. A control request with a prompt of a million tokens takes 5 MB."""
    count: int = 4096
    bytes: int = 64 << 20


class StoredRequests(RequestLog):
    """A `RequestLog` in the ranks' rendezvous store, which rank 0 writes and the other ranks read."""

    def __init__(
        self,
        store: CommonStore,
        key: bytes,
        *,
        bounds: RequestBounds | None = None,
        again_s: float = _AGAIN_S,
    ) -> None:
        """`store` and the encryption key `key` are equal on every rank and new at each group start."""
        super().__init__()
        self._store = store
        self._cipher = AESGCM(key)
        self._bounds = bounds or RequestBounds()
        self._submitting = threading.RLock()
        self._sealed: dict[int, bytes] = {}
        """The encrypted control requests that are still in the store, by number."""
        self._closed = False
        self._wanted = 0
        self._reading = threading.Lock()
        self._again_s = again_s
        self._next_query_s = 0.0

    def submit(self, content: bytes) -> int:
        """Store a control request; return its number. For rank 0, on any thread except the engine's.

        Raises `UsageError` if a limit is exceeded, and `LockstepError` if the store fails or the log is
        closed. Nothing has changed then.
        """
        with self._submitting:
            if self._closed:
                raise LockstepError("the group ended before the request was executed")
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
                    f"the ranks' rendezvous store does not accept the request: {error}"
                ) from error
            self._sealed[number] = sealed
            self.note(number, content)
            return number

    def close(self) -> None:
        """Refuse further control requests, and delete stored ones if the store answers in time."""
        self._closed = True
        last = threading.Thread(target=self._forget, name="lockstep-requests", daemon=True)
        # At interpreter shutdown no thread can start. The control requests then stay in the store,
        # encrypted.
        with suppress(RuntimeError):
            last.start()
            last.join(self._again_s)

    def learn(self, newest: int) -> None:
        self._wanted = newest
        if time.monotonic() >= self._next_query_s and self._reading.acquire(blocking=False):
            # Use a daemon thread, so that a store that does not answer cannot block the process's exit.
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
            # Ignore an error of writing the reserved key, because the next failed read writes the key
            # again.
            with suppress(OSError, RuntimeError):
                self._store.set(_UNREAD, b"")
            self._retry_later(error)
        finally:
            self._reading.release()

    def _retry_later(self, error: Exception) -> None:
        self._next_query_s = time.monotonic() + self._again_s
        why = str(error) or "its content is not the one written by rank 0"
        log.warning("request %d cannot be read yet: %s", self.count + 1, why)

    def _forget(self) -> None:
        """Delete the executed control requests from the store; after `close` delete all of them.

        Every rank has read a control request before it is executed, so no rank needs it afterwards.
        """
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
            raise UsageError(f"{len(waiting)} requests are queued, which is the limit; retry")
        if waiting_bytes + len(content) > bounds.bytes:
            raise UsageError(
                f"{waiting_bytes} bytes of requests are queued, and {len(content)} more would exceed"
                f" {bounds.bytes}; retry"
            )
