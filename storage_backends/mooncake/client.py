"""The part of the Mooncake Store client (`mooncake.store`) that `mooncake://` uses.

Calls of the client block, for at most 30 seconds if the master has stopped. Several threads may call
it, but a call after `close` crashes the process. Joining and leaving a store hold the interpreter lock,
so both are done only while the master answers.

Objects are written in put *sessions* and read in get sessions, which the library keeps by key. The
master opens one put session per key and refuses other writers, so the first writer wins. A get session
remembers where an object is stored, so that ranges are read without another query to the master.
"""

import ctypes
import mmap
import socket
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from ...coordinator.validated_settings import Settings
from ...errors import ConfigError
from ...ranks.protocol.transfer_engine_settings import Protocol
from ..buffers import address_of
from ..threaded_backend import Stop
from .pieces import LEASES, BufferPiece, Code, Columns, complete, move, renewing

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_REACH_TIMEOUT_S: Final = 5.0
_WHOLE_BYTES_MAX: Final = 1 << 30
"""Maximum bytes of an object on a disk. A larger one is not read, because the library can fetch an
object on a disk only whole."""


left_behind: list["MooncakeDistributedStore"] = []
"""Clients that could not leave their store. They are kept referenced, because garbage collection would
close them, and closing holds the interpreter lock while the master does not answer."""


@dataclass(frozen=True, kw_only=True)
class MooncakeSettings(Settings):
    """The settings with which a client joins a store."""

    master: str
    """The master's address as host:port."""
    host: str = "127.0.0.1"
    """The address at which other clients reach this process's segment (its memory in the store)."""
    metadata: str = "P2PHANDSHAKE"
    protocol: Protocol = "tcp"
    device: str = ""
    segment_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes of memory that this process contributes to the store; 0 means that it only uses the memory
    of others."""
    buffer_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 16 << 20
    """Bytes of the library's staging memory."""
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1


class MooncakeClient:
    """One client of a store. Thread-safe, except for `close`.

    `store` is the library's client after it has joined a store (see `set_up`). Unless stated otherwise,
    methods return one of the library's return codes per key.
    """

    def __init__(self, store: "MooncakeDistributedStore", settings: MooncakeSettings) -> None:
        from mooncake.store import ReplicateConfig

        self._store = store
        self._config = ReplicateConfig()
        self._config.replica_num = settings.replicas
        self._master = settings.master
        self.may_be_late = settings.protocol != "tcp"
        """Whether bytes of an abandoned transfer may still arrive. False for TCP, because the library
        disconnects when it abandons a transfer."""
        self._lock = threading.Lock()
        self._writing: set[str] = set()
        self._reading: Counter[str] = Counter()
        self._on_disk: set[str] = set()
        self._expired: set[str] = set()
        self._registered: list[int] = []

    def register(self, address: int, nbytes: int) -> bool:
        """Register memory that the library may read and write until `close`; False if refused."""
        if self._store.register_buffer(address, nbytes):
            return False
        self._registered.append(address)
        return True

    def exist(self, keys: list[str]) -> list[bool]:
        """Return for each key whether an object exists; all False if the master does not answer."""
        return [code == 1 for code in self.presence(keys)]

    def presence(self, keys: list[str]) -> list[int]:
        """Return per key 1 if an object exists, 0 if none does, or the library's negative error code.

        The answers are not a snapshot: the master checks the keys in any order while others write.
        """
        return complete(self._store.batch_is_exist(keys), keys)

    @contextmanager
    def reading(self, keys: list[str]) -> Generator[list[int]]:
        """Keep get sessions for these keys during the block; yield one return code per key.

        Objects whose return code is 0 can be read by `fetch` during the block.
        """
        with self._lock:
            self._reading.update(keys)
        try:
            # Treat keys with an expired lease as readable, because `fetch` obtains a new lease.
            yield [0 if code == Code.LEASE_EXPIRED else code for code in self._find(keys)]
        finally:
            # All readers of a key share one session of the library, so end a key's session only when no
            # reader uses the key any more.
            with self._lock:
                self._reading.subtract(keys)
                over = [key for key in set(keys) if not self._reading[key]]
                for key in over:
                    del self._reading[key]
                self._on_disk.difference_update(over)
                self._expired.difference_update(over)
                self._store.batch_get_session_end(over)

    def fetch(
        self, keys: list[str], pieces: Sequence[Sequence[BufferPiece]], stop: Stop
    ) -> list[int]:
        """Read pieces of objects; return per key the number of bytes read, or a negative error code."""
        with self._lock:
            slow = {at for at, key in enumerate(keys) if key in self._on_disk}
        fast = [at for at in range(len(keys)) if at not in slow]
        codes = [0] * len(keys)
        if fast:
            some = [keys[at] for at in fast]
            some_pieces = [pieces[at] for at in fast]
            by = renewing(self._fetch_ranges, self._find, self._dropped, stop)
            for at, code in zip(fast, move(by, some, some_pieces, stop), strict=True):
                codes[at] = code
        for at in slow:
            late = stop.due()
            codes[at] = Code.MASTER_LATE if late else self._fetch_slowly(keys[at], pieces[at], stop)
        return codes

    def _find(self, keys: list[str]) -> list[int]:
        """Start a get session with a new lease for each key; return one code per key.

        A code is 0 if the object can now be read, otherwise one of the library's return codes.
        """
        codes = complete(self._store.batch_get_session_start(keys), keys)
        # Remember the keys of objects that are only on disk, because such objects are read without a
        # session. Report success for these keys.
        on_disk = [key for key, code in zip(keys, codes, strict=True) if code == Code.NOT_IN_MEMORY]
        with self._lock:
            self._on_disk.update(on_disk)
        self._note_expired(keys, codes)
        # Replace the return code INVALID by that of a failed transfer: at the start of a session,
        # INVALID does not prove that the object is invalid.
        replaced: dict[int, int] = {Code.NOT_IN_MEMORY: 0, Code.INVALID: Code.NOT_TRANSFERRED}
        return [replaced.get(code, code) for code in codes]

    def _fetch_ranges(
        self, keys: list[str], addresses: Columns, lengths: Columns, offsets: Columns
    ) -> list[int]:
        fetch = self._store.batch_get_into_multi_buffer_ranges
        codes = complete(fetch(keys, addresses, lengths, offsets), keys)
        self._note_expired(keys, codes)
        return codes

    def _note_expired(self, keys: list[str], codes: list[int]) -> None:
        if Code.LEASE_EXPIRED in codes:
            found = zip(keys, codes, strict=True)
            with self._lock:
                self._expired.update(key for key, code in found if code == Code.LEASE_EXPIRED)

    def _dropped(self, key: str) -> bool:
        """Return whether the library may have ended a key's session while this reader used it.

        All readers of a key share one session, which the library ends when it finds the lease expired.
        """
        with self._lock:
            return key in self._expired or self._reading[key] > 1

    def _fetch_slowly(self, key: str, pieces: Sequence[BufferPiece], stop: Stop) -> int:
        """Read pieces of an object on a disk, by fetching the whole object and copying the pieces."""
        whole = self._whole_in_time(key, stop)
        if isinstance(whole, int):
            return whole
        if any(piece.offset + piece.nbytes > len(whole) for piece in pieces):
            return Code.INVALID
        address = address_of(whole)
        for piece in pieces:
            ctypes.memmove(piece.address, address + piece.offset, piece.nbytes)
        return sum(piece.nbytes for piece in pieces)

    def _whole_in_time(self, key: str, stop: Stop) -> mmap.mmap | int:
        """Return a copy of all bytes of an object, or a negative error code.

        Retries, at most `LEASES` times, if the bytes arrive after the object's lease has expired.
        """
        whole = self._whole(key)
        for _ in range(LEASES):
            if whole != Code.LEASE_EXPIRED:
                break
            whole = Code.MASTER_LATE if stop.due() else self._whole(key)
        return whole

    def _whole(self, key: str) -> mmap.mmap | int:
        nbytes = self.size(key)
        if nbytes <= 0:
            return nbytes or Code.INVALID
        if nbytes > _WHOLE_BYTES_MAX:
            return Code.NOT_TRANSFERRED
        whole = mmap.mmap(-1, nbytes)
        address = address_of(whole)
        if self._store.register_buffer(address, nbytes):
            return Code.NOT_TRANSFERRED
        try:
            (code,) = complete(
                self._store.batch_get_into_multi_buffers([key], [[address]], [[nbytes]]), [key]
            )
        finally:
            self._store.unregister_buffer(address)
        if code < 0:
            return Code.NOT_TRANSFERRED if code == Code.INVALID else code
        return whole

    def size(self, key: str) -> int:
        """Return the length of an object as the master states it, or a negative error code."""
        return self._store.get_size(key)

    def begin(self, keys: list[str], sizes: list[int]) -> list[int]:
        """Start writing objects; the return code of a key is 0 if this caller is its first writer.

        For each key with return code 0 the caller must call `finish` or `give_up`.
        """
        codes = [int(Code.EXISTS)] * len(keys)
        with self._lock:
            ours = [at for at, key in enumerate(keys) if key not in self._writing]
            # If a key occurs twice in one call, start only the first occurrence.
            ours = [at for at in ours if keys.index(keys[at]) == at]
            self._writing.update(keys[at] for at in ours)
        try:
            started = self._start([keys[at] for at in ours], [sizes[at] for at in ours])
            for at, code in zip(ours, started, strict=True):
                codes[at] = code
        finally:
            with self._lock:
                self._writing.difference_update(keys[at] for at in ours if codes[at])
        return codes

    def send(
        self, keys: list[str], pieces: Sequence[Sequence[BufferPiece]], stop: Stop
    ) -> list[int]:
        """Write pieces of started objects; return per key the bytes written, or a negative code."""
        return move(self._store.batch_put_from_multi_buffer_ranges, keys, pieces, stop)

    def finish(self, keys: list[str]) -> list[int]:
        """Make completely written objects visible to readers."""
        if not keys:
            return []
        codes = complete(self._store.batch_put_session_end(keys), keys)
        failed = [key for key, code in zip(keys, codes, strict=True) if code]
        self.give_up(failed)
        with self._lock:
            self._writing.difference_update(keys)
        return codes

    def give_up(self, keys: list[str]) -> None:
        """Discard objects that were started with `begin`."""
        if keys:
            self._store.batch_put_session_revoke(keys)
            with self._lock:
                self._writing.difference_update(keys)

    def remove(self, keys: list[str]) -> list[int]:
        """Remove objects, even if they are being read."""
        return complete(self._store.batch_remove(keys, True), keys)

    def close(self) -> None:
        """Leave the store; the objects in this process's segment are lost. Takes some seconds.

        If the master does not answer, the client stays in the store until the process exits.
        """
        self.unregister()
        if _answers(self._master):
            self._store.close()
        else:
            left_behind.append(self._store)

    def unregister(self) -> None:
        """Unregister all registered memory."""
        for address in self._registered:
            self._store.unregister_buffer(address)
        self._registered.clear()

    def _start(self, keys: list[str], sizes: list[int]) -> list[int]:
        if not keys:
            return []
        codes = complete(self._store.batch_put_session_start(keys, sizes, self._config), keys)
        # INVALID means that the library still has the session of an earlier write of the key: the
        # master did not answer when that session should have ended. Revoke the old session, and start a
        # new one.
        stale = [at for at, code in enumerate(codes) if code == Code.INVALID]
        if stale:
            again = [keys[at] for at in stale]
            self._store.batch_put_session_revoke(again)
            wanted = [sizes[at] for at in stale]
            answer = self._store.batch_put_session_start(again, wanted, self._config)
            for at, code in zip(stale, complete(answer, again), strict=True):
                codes[at] = code
        return codes


def connect(settings: MooncakeSettings) -> MooncakeClient:
    """Join a store. Blocks for half a minute if the device does not exist. Raises `ConfigError`."""
    return MooncakeClient(set_up(settings), settings)


def set_up(settings: MooncakeSettings) -> "MooncakeDistributedStore":
    """Return a client of the library that has joined the store; see `connect`."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"store mooncake://{settings.master}: the client cannot be loaded ({error}); install "
            "mooncake-transfer-engine-non-cuda 0.3.13 or newer, and the system's libibverbs1"
        ) from error
    if not hasattr(MooncakeDistributedStore, "batch_put_session_start"):
        raise ConfigError(
            f"store mooncake://{settings.master}: the installed client has no put sessions; install "
            "mooncake-transfer-engine-non-cuda 0.3.13 or newer"
        )
    # Check first that the master answers, because the library would retry for a minute and a half.
    if not _answers(settings.master):
        raise ConfigError(
            f"store mooncake://{settings.master}: no master answers there; start mooncake_master, or "
            "correct the address"
        )
    store = MooncakeDistributedStore()
    code = store.setup(
        settings.host,
        settings.metadata,
        settings.segment_bytes,
        settings.buffer_bytes,
        settings.protocol,
        settings.device,
        settings.master,
    )
    if code:
        raise ConfigError(
            f"store mooncake://{settings.master}: the client could not be set up (code {code}); "
            f"check protocol={settings.protocol}, device={settings.device!r}, "
            f"metadata={settings.metadata} and host={settings.host}"
        )
    return store


def _answers(master: str) -> bool:
    """Return whether a running master answers at this address.

    A successful connection proves nothing, because the kernel accepts it for a stopped process too.
    """
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S) as link:
            link.settimeout(_REACH_TIMEOUT_S)
            # Send bytes that are not a valid request: a running master then disconnects at once.
            link.sendall(bytes(64))
            link.recv(1)
    except ConnectionResetError:
        return True
    except (OSError, UnicodeError):
        # Catch UnicodeError too, because impossible host names raise it.
        return False
    return True
