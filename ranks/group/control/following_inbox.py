"""The inbox of a rank other than 0, which has from rank 0 what that has numbered."""

import asyncio
import logging
import threading

from ....errors import ConfigError, MessageError
from ...protocol.host_port import split_address
from ..member.messages import Backlog
from .frames import Connection, Kind
from .loop_thread import LoopThread
from .numbering import InboxBounds

_PAUSES_S = (0.02, 0.1, 0.5, 1.0)
"""How long to wait before connecting again: so long the first time, then the next, then the last."""
_CONNECTS_S = 10.0

log = logging.getLogger("lockstep")


class FollowingInbox:
    """Follows rank 0 from the moment that it is made, on a thread of its own. Thread-safe.

    A connection that is lost is made again, and goes on from the number that this rank has. It gives up
    only if rank 0 refuses it, as one of another start of the group: no more messages reach this rank
    then, none becomes a command on any, and the log says why.
    """

    def __init__(
        self, address: str, *, secret: bytes, rank: int, bounds: InboxBounds | None = None
    ) -> None:
        """`address` and `secret` are those of rank 0's inbox."""
        self._address = address
        self._secret = secret
        self._bounds = bounds or InboxBounds()
        self._rank = rank
        self._backlog = Backlog()
        self._decided = threading.Event()
        """Set once rank 0 was reached, or has refused this rank."""
        self._trouble = f"rank {rank} has not reached rank 0 at {address}"
        self._refused = False
        self._loop = LoopThread("lockstep-inbox")
        self._loop.start(self._follow())

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

    def require_connected(self, timeout_s: float) -> None:
        """Wait until rank 0 was reached; raises `ConfigError` if it is not, or refuses this rank."""
        if not self._decided.wait(timeout_s) or self._refused:
            raise ConfigError(self._trouble)

    def close(self) -> None:
        """See `OpenInbox`."""
        self._loop.close()

    async def _follow(self) -> None:
        """Be connected to rank 0 until this is closed, or refused."""
        failures = 0
        while True:
            before = self._backlog.count
            try:
                await self._receive()
            except MessageError as error:
                self._trouble = f"rank 0 at {self._address} refuses rank {self._rank}: {error}"
                self._refused = True
                break
            except (OSError, EOFError, TimeoutError) as error:
                what = str(error) or type(error).__name__
                self._trouble = (
                    f"rank {self._rank} does not reach rank 0 at {self._address}: {what}"
                )
            failures = 0 if self._backlog.count > before else failures + 1
            await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
        log.error("%s; no message becomes a command any more", self._trouble)
        self._decided.set()

    async def _receive(self) -> None:
        host, port = split_address(self._address)
        async with asyncio.timeout(_CONNECTS_S):
            connection = await Connection.to(
                host, port, bytes_max=self._bounds.message_bytes, secret=self._secret
            )
        try:
            await connection.send(Kind.FOLLOW, self._rank, self._backlog.count)
            self._decided.set()
            while True:
                number, content = await connection.receive(Kind.MESSAGE)
                self._backlog.note(number, content)
                await connection.send(Kind.HAVE, self._backlog.count)
        finally:
            connection.abort()
