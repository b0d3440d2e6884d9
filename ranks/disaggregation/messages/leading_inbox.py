"""Rank 0's inbox: it takes messages from senders, numbers them, and hands them on to other ranks."""

import asyncio
import logging
from concurrent.futures import Future
from contextlib import suppress

from ....errors import ConfigError
from ....storage_backends.host_port import joined_address, split_address
from ...messages import CONTROL_MAGIC, Backlog
from ..refusal import Refusal, Refused
from .frames import Connection, Kind
from .loop_thread import LoopThread
from .numbering import InboxBounds, Numbering

IDLE_S = 300.0
"""How long a sender may be connected and say nothing; it connects again when it has to."""
_OPENS_S = 10.0
"""How long a listening socket may take to be opened."""
_HANDSHAKE_S = 10.0
"""How long whoever has connected may take to say who it is."""

log = logging.getLogger("lockstep")


class LeadingInbox:
    """Listens on TCP from the moment that it is made, on a thread of its own. Thread-safe.

    A sender is answered once its message has its number, or by the name of the bound that it exceeds.
    Another rank is handed every message from the first on that it does not have, so one whose
    connection was lost goes on where it was.
    """

    def __init__(
        self,
        address: str,
        *,
        told_address: str = "",
        secret: bytes,
        bounds: InboxBounds,
        life: bytes,
        world_size: int,
    ) -> None:
        """`life` is of this start of the group alone. Raises `ConfigError` where it cannot listen."""
        self.life = life
        self._secret = secret
        self._bounds = bounds
        self._backlog = Backlog()
        self._numbering = Numbering(bounds, self._backlog, range(1, world_size))
        self._own_sequence = 0
        self._numbered: dict[int, asyncio.Event] = {}
        """By follower: set when there may be more to hand on."""
        self._leads: dict[int, Connection] = {}
        self._serving = set[asyncio.Task[None]]()
        self._greetings: dict[Connection, None] = {}
        """Those of whom it is not known yet whether they have the secret, the oldest first."""
        self._admitted = set[Connection]()
        self._server: asyncio.Server | None = None
        self._loop = LoopThread("lockstep-inbox")
        try:
            host, port = self._loop.start(self._listen(address)).result(_OPENS_S)
        except (OSError, TimeoutError) as error:
            self._loop.close()
            raise ConfigError(f"rank 0 cannot take messages at {address}: {error}") from error
        self.address = told_address or joined_address(host, port)
        """Where senders and other ranks reach this inbox."""

    @property
    def count(self) -> int:
        """See `Inbox`."""
        return self._backlog.count

    def read(self, number: int) -> bytes:
        """See `Inbox`."""
        return self._backlog.read(number)

    def let_go(self, through: int) -> None:
        """See `Inbox`."""
        self._backlog.let_go(through)

    def wait(self, count: int, timeout_s: float) -> bool:
        """See `OpenInbox`."""
        return self._backlog.wait(count, timeout_s)

    def submit(self, content: bytes) -> "Future[int]":
        """Take a message of this process itself; the result is its number. For any thread.

        The future fails with `Refused` by the name of a bound that the message exceeds.
        """
        return self._loop.start(self._take_own(content))

    async def _take_own(self, content: bytes) -> int:
        self._own_sequence += 1
        return self._take(self.life, self._own_sequence, content)

    def _take(self, sender: bytes, sequence: int, content: bytes) -> int:
        number = self._numbering.take(sender, sequence, content)
        for event in self._numbered.values():
            event.set()
        return number

    def close(self) -> None:
        """See `OpenInbox`."""
        if self._server is not None:
            self._loop.call(self._server.close)
        self._loop.close()

    async def _listen(self, address: str) -> tuple[str, int]:
        host, port = split_address(address)
        self._server = await asyncio.start_server(self._accept, host, port)
        return host, self._server.sockets[0].getsockname()[1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, bytes_max=self._bounds.message_bytes)
        if len(self._greetings) >= self._bounds.greetings:
            # Whoever has the secret shows it at once, so strangers cannot keep others out by waiting.
            oldest = next(iter(self._greetings))
            del self._greetings[oldest]
            oldest.abort()
        self._greetings[connection] = None
        # A task that the server itself begins logs an error when it is cancelled, in some Pythons.
        serving = asyncio.create_task(self._serve(connection))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, connection: Connection) -> None:
        """Serve one connection to its end."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await connection.admit(self._secret, self.address)
                self._greetings.pop(connection, None)
                self._admitted.add(connection)
                if len(self._admitted) > self._bounds.connections:
                    full = f"{self._bounds.connections} are connected, which is as many as may be"
                    raise Refused(Refusal.FULL, full)
                await connection.send(Kind.BOUND, self._bounds.message_bytes)
            await self._answer(connection)
        except Refused as refused:
            log.warning("a connection to the inbox of rank 0 ends: %s", refused)
            await self._part(connection, refused)
        except (OSError, EOFError, TimeoutError):
            # Whoever it was connects again, and says again what was not answered.
            pass
        finally:
            self._greetings.pop(connection, None)
            self._admitted.discard(connection)
            connection.abort()

    async def _part(self, connection: Connection, refused: Refused) -> None:
        """Say why a connection ends, if the other side still listens."""
        with suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(_HANDSHAKE_S):
                await connection.refuse(0, refused)
                await connection.close()

    async def _answer(self, connection: Connection) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                kind, fields = await connection.receive(Kind.SEND, Kind.FOLLOW)
            if kind is Kind.FOLLOW:
                await self._lead(connection, *fields)
                return
            sender, sequence, content = fields
            try:
                if content.startswith(CONTROL_MAGIC):
                    mine = "only rank 0's own process may ask the cache for something"
                    raise Refused(Refusal.STRANGER, mine)
                number = self._take(sender, sequence, content)
            except Refused as refused:
                await connection.refuse(max(1, sequence), refused)
            else:
                await connection.send(Kind.TAKEN, sequence, number)

    async def _lead(self, connection: Connection, life: bytes, rank: int, had: int) -> None:
        """Hand messages on to another rank, from those that it has."""
        if life != self.life:
            raise Refused(Refusal.STRANGER, f"rank {rank} is of another start of the group")
        self._numbering.require_follower(rank, had)
        self._numbering.reach(rank, had)
        earlier = self._leads.pop(rank, None)
        if earlier is not None:
            # It has connected anew: it will not read there any more.
            earlier.abort()
        self._leads[rank] = connection
        event = self._numbered[rank] = asyncio.Event()
        feeding = asyncio.create_task(self._feed(connection, event, had))
        try:
            while True:
                _, (count,) = await connection.receive(Kind.HAVE)
                self._numbering.reach(rank, count)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            if self._leads.get(rank) is connection:
                del self._leads[rank], self._numbered[rank]

    async def _feed(self, connection: Connection, event: asyncio.Event, told: int) -> None:
        try:
            while True:
                event.clear()
                while told < self._numbering.last:
                    told += 1
                    await connection.send(Kind.MESSAGE, told, self._numbering.read(told))
                await event.wait()
        except OSError:
            connection.abort()
