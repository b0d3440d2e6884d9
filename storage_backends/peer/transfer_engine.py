"""Mooncake's transfer engine: it reads registered memory of other processes, over RDMA or TCP.

Whoever knows an engine's address reads and writes all memory that is registered with it: the library
listens on every interface of the host, and knows no secret. A call blocks for as long as the library
likes, 30 seconds over TCP where the other process has stopped, and cannot be ended from here; it lets
other threads run Python meanwhile. An engine that reads is shared by the process and never ended, since
one of its calls may be held.
"""

import json
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from ...errors import StorageError
from ...ranks.protocol.engine_settings import EngineSettings
from ...ranks.protocol.host_port import joined_address
from ..buffers import address_of

_METADATA: Final = "P2PHANDSHAKE"
"""Engines tell each other what they have registered; nothing else keeps it."""
_MISSING: Final = "install mooncake-transfer-engine-non-cuda 0.3.13 or newer, and libibverbs1"


class Piece(NamedTuple):
    """Bytes to be read, by their address here and there."""

    here: int
    there: int
    nbytes: int


class TransferEngine:
    """One engine, and what is registered with it. Thread-safe, but for `close`."""

    def __init__(self, protocol: str, device: str, host: str) -> None:
        """Start an engine that others reach at `host`; raises `StorageError` if there is none."""
        try:
            # Of two threads that import it at once, one may find the package without its module.
            from mooncake.engine import TransferEngine as Engine
        except ImportError as error:
            raise StorageError(
                f"Mooncake's transfer engine cannot be loaded ({error}); {_MISSING}"
            ) from error
        made = Engine()
        if made.initialize(host, _METADATA, protocol, device):
            raise StorageError(f"Mooncake's transfer engine does not start at {host}")
        if protocol == "rdma" and not _devices(made.get_local_topology()):
            # The library takes TCP without a word.
            named = f" called {device!r}" if device else ""
            raise StorageError(
                f"Mooncake's transfer engine finds no RDMA device{named} on this host; use tcp"
            )
        self._engine: Engine | None = made
        self._registered: dict[int, memoryview] = {}
        """What is registered, by its address; it stays where it is for so long."""
        self.address = f"{protocol}://{joined_address(host, made.get_rpc_port())}"
        """What other engines are told, to read from this one."""

    def register(self, memory: Sequence[memoryview]) -> None:
        """Let engines read and write this memory, until `unregister`; raises `StorageError`."""
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
        """Let no engine begin to read or write this memory."""
        assert self._engine is not None
        for each in memory:
            address = address_of(each)
            self._engine.unregister_memory(address)
            del self._registered[address]

    def read(self, target: str, pieces: Sequence[Piece]) -> bool:
        """Read pieces of another engine's memory; say whether all have come. Blocks.

        `target` is the other's address without its protocol, and the memory here is registered.
        """
        if not pieces:
            return True
        assert self._engine is not None
        here, there, lengths = map(list, zip(*pieces, strict=True))
        return self._engine.batch_transfer_sync_read(target, here, there, lengths) == 0

    def close(self) -> None:
        """End the engine: then nothing of it touches what was registered. Idempotent.

        Not for one that reads: a call of it may be held.
        """
        if self._engine is not None:
            self.unregister(*self._registered.values())
            # The library ends with its object, and waits for its threads.
            self._engine = None


_shared: dict[tuple[str, str, str], TransferEngine | StorageError] = {}
_sharing: Final = threading.Lock()


def shared_engine(settings: EngineSettings, host: str) -> TransferEngine:
    """Return the engine by which this process reads, which is started when first asked for.

    `host` is this one, as others reach it. Raises `StorageError` if there is none, each time; blocks
    for as long as the library takes.
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
    """Say whether a topology as the library tells it has any RDMA device."""
    found = cast("dict[str, list[list[str]]]", json.loads(topology))
    return any(devices for lists in found.values() for devices in lists)
