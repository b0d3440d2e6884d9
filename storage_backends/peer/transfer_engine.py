"""Mooncake's transfer engine, which reads registered memory of other processes over RDMA or TCP.

Anyone who knows an engine's address can read and write all memory registered with it, because the
library listens on every interface and uses no secret. A call may block (30 seconds over TCP if the
other process has stopped) and cannot be cancelled; it releases the interpreter lock. All readers in the
process share one engine, which is never closed, because one of its calls may hang.
"""

import json
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from ...errors import StorageError
from ...ranks.protocol.host_port import joined_address
from ...ranks.protocol.transfer_engine_settings import TransferEngineSettings
from ..buffers import address_of

_METADATA: Final = "P2PHANDSHAKE"
"""The library's setting for running without a metadata server: engines exchange their registrations
directly."""
_MISSING: Final = "install mooncake-transfer-engine-non-cuda 0.3.13 or newer, and libibverbs1"


class RemotePiece(NamedTuple):
    """A range of bytes for an engine to read: local address, remote address and length."""

    here: int
    there: int
    nbytes: int


class TransferEngine:
    """One engine with its registered memory. Thread-safe, except for `close`."""

    def __init__(self, protocol: str, device: str, host: str) -> None:
        """Start an engine reachable at `host`; raises `StorageError` if that fails."""
        try:
            # An `ImportError` does not prove that the package is missing: if two threads import it at
            # the same time, one of them may get this error.
            from mooncake.engine import TransferEngine as Engine
        except ImportError as error:
            raise StorageError(
                f"Mooncake's transfer engine cannot be loaded ({error}); {_MISSING}"
            ) from error
        made = Engine()
        if made.initialize(host, _METADATA, protocol, device):
            raise StorageError(f"Mooncake's transfer engine does not start at {host}")
        if protocol == "rdma" and not _devices(made.get_local_topology()):
            # Raise an error, because without a device the library would silently use TCP.
            named = f" called {device!r}" if device else ""
            raise StorageError(
                f"Mooncake's transfer engine finds no RDMA device{named} on this host; use tcp"
            )
        self._engine: Engine | None = made
        self._registered: dict[int, memoryview] = {}
        """Registered memory by address. The references keep the memory allocated."""
        self.address = f"{protocol}://{joined_address(host, made.get_rpc_port())}"
        """The address that other engines use to read from this engine."""

    def register(self, memory: Sequence[memoryview]) -> None:
        """Allow other engines to read and write this memory until `unregister`.

        Raises `StorageError` if the library refuses.
        """
        assert self._engine is not None
        for each in memory:
            if not len(each):
                continue
            address = address_of(each)
            if self._engine.register_memory(address, len(each)):
                raise StorageError(
                    f"Mooncake's transfer engine cannot register {len(each)} bytes; over RDMA, raise"
                    " the limit of locked memory (ulimit -l)"
                )
            self._registered[address] = each

    def unregister(self, *memory: memoryview) -> None:
        """Prevent other engines from starting reads or writes of this memory."""
        assert self._engine is not None
        for each in memory:
            address = address_of(each)
            self._engine.unregister_memory(address)
            del self._registered[address]

    def read(self, target: str, pieces: Sequence[RemotePiece]) -> bool:
        """Read pieces of another engine's memory; return whether all were read. Blocks.

        `target` is the other engine's address without the protocol. The local memory must be
        registered.
        """
        if not pieces:
            return True
        assert self._engine is not None
        here, there, lengths = map(list, zip(*pieces, strict=True))
        return self._engine.batch_transfer_sync_read(target, here, there, lengths) == 0

    def close(self) -> None:
        """Stop the engine; afterwards it does not touch the registered memory. Idempotent.

        Do not call this for an engine that was used for reads, because a read may hang.
        """
        if self._engine is not None:
            self.unregister(*self._registered.values())
            # Delete the library's object, which stops its engine and waits for its threads.
            self._engine = None


_shared: dict[tuple[str, str, str], TransferEngine | StorageError] = {}
_sharing: Final = threading.Lock()


def shared_engine(settings: TransferEngineSettings, host: str) -> TransferEngine:
    """Return the engine that all reads of this process share; the first call starts it.

    `host` is the address at which other hosts reach this host. Blocks while the library starts. Raises
    `StorageError` in every call if the engine cannot start.
    """
    key = (settings.protocol, settings.device, host)
    with _sharing:
        if key not in _shared:
            try:
                _shared[key] = TransferEngine(*key)
            except StorageError as error:
                _shared[key] = error
        found = _shared[key]
    if isinstance(found, StorageError):
        raise StorageError(str(found))
    return found


def _devices(topology: str) -> bool:
    """Return whether the topology that the library reports contains an RDMA device."""
    found = cast("dict[str, list[list[str]]]", json.loads(topology))
    return any(devices for lists in found.values() for devices in lists)
