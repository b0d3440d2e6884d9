"""The inboxes of a group on loopback, and senders that say byte for byte what a test wants said."""

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from lockstep.ranks.disaggregation.messages.following_inbox import FollowingInbox
from lockstep.ranks.disaggregation.messages.frames import Connection, Kind, refused_as
from lockstep.ranks.disaggregation.messages.inbox import OpenInbox
from lockstep.ranks.disaggregation.messages.leading_inbox import LeadingInbox
from lockstep.ranks.disaggregation.messages.numbering import SENDER_BYTES, InboxBounds
from lockstep.ranks.disaggregation.refusal import Refused
from lockstep.storage_backends.host_port import split_address

PATIENCE_S = 30.0
"""What only an inbox takes that does not work."""
LIFE = b"start of a group"
SECRET = b"known to all of the groups"
NAME = b"s" * SENDER_BYTES

T = TypeVar("T")


class Inboxes:
    """The inboxes of all ranks of a group."""

    def __init__(
        self,
        ranks: int = 1,
        *,
        secret: bytes = b"",
        bounds: InboxBounds | None = None,
    ) -> None:
        self.secret, self.bounds = secret, bounds or InboxBounds()
        self.leading = LeadingInbox(
            "127.0.0.1:0", secret=secret, bounds=self.bounds, life=LIFE, world_size=ranks
        )
        self.following: list[FollowingInbox] = []

    def follow(self, rank: int, address: str = "", *, life: bytes = LIFE) -> FollowingInbox:
        """Let a rank follow rank 0, at its own address or at another one that leads there."""
        inbox = FollowingInbox(
            address or self.leading.address,
            secret=self.secret,
            bounds=self.bounds,
            life=life,
            rank=rank,
        )
        self.following.append(inbox)
        return inbox

    @property
    def address(self) -> str:
        """Where senders reach the group."""
        return self.leading.address

    def contents(self, count: int) -> list[list[bytes]]:
        """Wait until every rank has so many messages; return those of each, by rank."""
        every: list[OpenInbox] = [self.leading, *self.following]
        for inbox in every:
            assert inbox.wait(count, PATIENCE_S), f"{inbox.count} of {count} messages have come"
        return [[inbox.read(number) for number in range(1, count + 1)] for inbox in every]

    def say(self, *messages: tuple[int, bytes]) -> list[int | Refused]:
        """Send messages by their sequence numbers over one connection; return each answer."""
        return run(self._say(messages))

    async def _say(self, messages: Sequence[tuple[int, bytes]]) -> list[int | Refused]:
        connection = await self.connection()
        answers: list[int | Refused] = []
        for sequence, content in messages:
            await connection.send(Kind.SEND, NAME, sequence, content)
            kind, fields = await connection.receive(Kind.TAKEN, Kind.REFUSED)
            assert fields[0] == sequence
            answers.append(fields[1] if kind is Kind.TAKEN else refused_as(fields[1], fields[2]))
        await connection.close()
        return answers

    async def connection(self) -> Connection:
        """Return a connection to rank 0 after its handshake."""
        host, port = split_address(self.address)
        connection = await Connection.to(
            host, port, bytes_max=self.bounds.message_bytes, secret=self.secret
        )
        try:
            await connection.receive(Kind.BOUND)
        except BaseException:
            connection.abort()
            raise
        return connection

    def __enter__(self) -> Self:
        """Return the inboxes."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close them all."""
        every: list[OpenInbox] = [*self.following, self.leading]
        for inbox in every:
            inbox.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns, within a deadline."""

    async def in_time() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await work

    return asyncio.run(in_time())
