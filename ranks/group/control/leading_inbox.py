"""Rank 0's inbox: it numbers the messages of its own process, and hands them on to other ranks."""

import asyncio
import logging
from concurrent.futures import Future
from contextlib import suppress

from ....errors import ConfigError, MessageError
from ...protocol.host_port import joined_address, split_address
from ..member.messages import Backlog
from .frames import Connection, Kind
from .loop_thread import LoopThread
from .numbering import InboxBounds, Numbering

_HANDSHAKE_S = 10.0
"""How long whoever has connected may take to say who it is."""

log = logging.getLogger("lockstep")


class LeadingInbox:
    """Listens on TCP from the moment that it is made, on a thread of its own. Thread-safe.

    Another rank is handed every message from the first on that it does not have, so one whose
    connection was lost goes on where it was.
    """

    def __init__(
        self, address: str, *, secret: bytes, world_size: int, bounds: InboxBounds | None = None
    ) -> None:
        """`secret` is of this start of the group alone. Raises `ConfigError` if it cannot listen."""
        self._secret = secret
        self._bounds = bounds or InboxBounds()
        self._backlog = Backlog()
        self._numbering = Numbering(self._bounds, self._backlog, range(1, world_size))
        self._numbered: dict[int, asyncio.Event] = {}
        """By follower: set when there may be more to hand on."""
        self._leads: dict[int, Connection] = {}
        self._serving = set[asyncio.Task[None]]()
        self._greetings: dict[Connection, None] = {}
        """Those of whom it is not known yet whether they have the secret, the oldest first."""
        host, port = split_address(address)
        self._loop = LoopThread("lockstep-inbox")
        try:
            port = self._loop.listen(self._accept, host, port)
        except (OSError, TimeoutError) as error:
            self._loop.close()
            raise ConfigError(f"rank 0 cannot take messages at {address}: {error}") from error
        self.address = joined_address(host, port)
        """Where other ranks reach this inbox."""

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
        """See `Inbox`."""
        return self._backlog.wait(count, timeout_s)

    def submit(self, content: bytes) -> "Future[int]":
        """Take a message of this process; the result is its number. For any thread.

        The future fails with `MessageError` if the message exceeds a bound.
        """
        return self._loop.start(self._take(content))

    def close(self) -> None:
        """See `OpenInbox`."""
        self._loop.close()

    async def _take(self, content: bytes) -> int:
        number = self._numbering.take(content)
        for event in self._numbered.values():
            event.set()
        return number

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
        # A task that is cancelled before its first step runs none of its own code.
        serving.add_done_callback(lambda _: connection.abort())

    async def _serve(self, connection: Connection) -> None:
        """Serve one connection to its end."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await connection.admit(self._secret, self.address)
                self._greetings.pop(connection, None)
                rank, had = await connection.receive(Kind.FOLLOW)
            await self._lead(connection, rank, had)
        except MessageError as error:
            log.warning("a connection to the inbox of rank 0 ends: %s", error)
            with suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(_HANDSHAKE_S):
                    await connection.refuse(str(error))
        except (OSError, EOFError, TimeoutError):
            # A rank connects again, and says what it has.
            pass
        finally:
            self._greetings.pop(connection, None)

    async def _lead(self, connection: Connection, rank: int, had: int) -> None:
        """Hand messages on to another rank, from those that it has."""
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
                (count,) = await connection.receive(Kind.HAVE)
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
