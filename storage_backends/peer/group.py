"""The serving group: its ranks, the objects that each rank can have, and the connections to them."""

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from msgspec import structs

from ...errors import ConfigError, LockstepError, StorageError
from ...page_format.object_name import ObjectName
from ...ranks.protocol.allowed_sources import AllowedSources
from ...ranks.protocol.transfer_engine_settings import TransferEngineSettings
from ..error_log import LoggedError
from ..handshake import UNPROVEN_S, UnprovenError
from .connection import Connection, connect
from .one_sided import OneSidedReads
from .wire import Hello

_log = logging.getLogger(__name__)

_Key = tuple[str, str]
"""(pool, shard) of an object's name. They determine which ranks can have the object."""
Address = str
_SHORT: Final = 12


class PeerGroup:
    """Maps objects to ranks, and connects to a rank when its first request is sent.

    Used only by the event loop's thread. There is at most one connection per rank. If it has broken,
    the next call that needs it reconnects. Each new connection to the rank in the URI updates the list
    of ranks.
    """

    def __init__(
        self,
        entry: Address,
        secret: str,
        store: str,
        *,
        connect_s: float,
        inflight_bytes: int,
        engine: TransferEngineSettings | None = None,
        allowed: AllowedSources,
    ) -> None:
        """`entry` is the rank in the URI. It must be in `allowed`; the ranks that it lists are trusted.

        If `engine` is given, objects are read by a transfer engine from ranks that have one too.
        """
        self._entry = entry
        self._secret = secret.encode()
        self._store = store
        self._connect_s = connect_s
        self._inflight_bytes = inflight_bytes
        self._allowed = allowed
        self._unproven: dict[Address, float] = {}
        """For each rank that failed to prove its identity, the time until which no connection is tried.
        """
        self._connections: dict[Address, Connection] = {}
        self._connecting: dict[Address, asyncio.Task[Connection]] = {}
        self._hello: Hello | None = None
        self._places: Mapping[_Key, tuple[Address, ...]] = {}
        self._one_sided = None if engine is None else OneSidedReads(engine)
        self._breaks = LoggedError(_log)
        self._engines = LoggedError(_log)
        self._namespaces = LoggedError(_log)
        self._closed = False

    async def enter(self) -> None:
        """Connect to the rank in the URI; raises `ConfigError` if that is impossible."""
        try:
            await self._connect(self._entry)
        except ConfigError:
            raise
        except (OSError, LockstepError) as error:
            raise ConfigError(
                f"store {self._store!r} cannot be used: {_reason(error)}; check that the serving"
                " group runs, and that it can be reached from here"
            ) from error

    async def enter_again(self, deadline: float) -> None:
        """Reconnect to the rank in the URI if its connection broke. Raises what `connection` raises."""
        await self.connection(self._entry, deadline)

    def rank_of(self, name: ObjectName, digest: bytes) -> Address | None:
        """Return the rank to read an object from, or None if no rank of the group can have it.

        If several ranks have a replicated object, the digest of the object's name selects one of them.
        """
        ranks = self._places.get((name.pool, name.shard), ())
        if not ranks or not self._is_of(name.namespace):
            return None
        return ranks[int.from_bytes(digest[:8], "big") % len(ranks)]

    async def connection(self, address: Address, deadline: float) -> Connection:
        """Return the connection to the rank at `address`; connect first if there is none.

        Raises `TimeoutError` at the deadline, and `OSError` or `LockstepError` if connecting fails.
        Callers share one connection attempt, and a cancelled caller does not cancel it.
        """
        found = self._connections.get(address)
        if found is not None and found.is_open:
            return found
        if self._closed:
            raise StorageError("the store is closed")
        if time.monotonic() < self._unproven.get(address, 0.0):
            raise StorageError(f"{address} has not proved its identity")
        task = self._connecting.get(address)
        if task is None:
            task = asyncio.create_task(self._connect(address))
            self._connecting[address] = task
            task.add_done_callback(partial(self._connected, address))
        await asyncio.wait([task], timeout=max(0.0, deadline - time.monotonic()))
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise StorageError("the store is closed")
        return task.result()

    async def close(self) -> None:
        """Close the connections to all ranks. Idempotent."""
        self._closed = True
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._one_sided is not None:
            self._one_sided.close()

    def _is_of(self, namespace: str) -> bool:
        """Return whether the serving group's objects are in this namespace; log a warning if not."""
        assert self._hello is not None
        if namespace == self._hello.namespace:
            return True
        self._namespaces.warn(
            "store %s has pages of namespace %s, but namespace %s was requested, so every lookup"
            " misses; give both groups the same model, weights, page layout and tenant",
            self._store,
            self._hello.namespace[:_SHORT],
            namespace[:_SHORT],
        )
        return False

    async def _connect(self, address: Address) -> Connection:
        broke = partial(self._broke, address)
        allowed = self._allowed if address == self._entry else AllowedSources()
        try:
            async with asyncio.timeout(self._connect_s):
                made = await connect(
                    address,
                    self._secret,
                    self._store,
                    inflight_bytes=self._inflight_bytes,
                    broke=broke,
                    allowed=allowed,
                )
        except UnprovenError:
            self._unproven[address] = time.monotonic() + UNPROVEN_S
            raise
        except TimeoutError:
            raise StorageError(f"no answer within {self._connect_s:g} s") from None
        try:
            await self._find_engine(made)
        except BaseException:
            made.close()
            raise
        if address == self._entry:
            self._hello = made.hello
            self._places = _places(made.hello, address)
            self._unproven.clear()
        elif (
            self._hello is None or structs.replace(made.hello, rank=self._hello.rank) != self._hello
        ):
            made.close()
            raise StorageError(f"the rank at {address} belongs to another group")
        self._connections[address] = made
        return made

    async def _find_engine(self, made: Connection) -> None:
        """Use a transfer engine to read the objects of a rank if both sides have an engine.

        Otherwise log the reason, or raise `ConfigError` if the settings insist on an engine.
        """
        if self._one_sided is None:
            return
        settings, theirs = self._one_sided.settings, made.hello.ranks[made.hello.rank].engine
        protocol, _, target = theirs.partition("://")
        try:
            if not theirs:
                raise StorageError(
                    "the other group has no engine; set transfer='mooncake' there as well"
                )
            if protocol != settings.protocol:
                raise StorageError(f"its protocol is {protocol} there and {settings.protocol} here")
            await self._one_sided.start(made.host, self._connect_s)
        except StorageError as error:
            message = f"store {self._store!r} cannot be read by Mooncake's transfer engine: {error}"
            if settings.insists:
                raise ConfigError(message) from None
            self._engines.warn("%s; pages come over the connection", message)
        else:
            made.read_by(self._one_sided, target)

    def _connected(self, address: Address, task: asyncio.Task[Connection]) -> None:
        del self._connecting[address]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(address, _reason(error))

    def _broke(self, address: Address, why: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()
        if why:
            self._breaks.warn(
                "store %s: the connection to %s cannot be used (%s); reads from there fail until it"
                " is restored",
                self._store,
                address,
                why,
            )


def _places(hello: Hello, entry: Address) -> dict[_Key, tuple[Address, ...]]:
    places: dict[_Key, tuple[Address, ...]] = {}
    for number, rank in enumerate(hello.ranks):
        # For the rank in the URI, use the address in the URI, even if the group lists another one. So
        # there is only one connection to that rank.
        address = entry if number == hello.rank else rank.address
        for key in rank.shards:
            places[key] = (*places.get(key, ()), address)
    return places


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
