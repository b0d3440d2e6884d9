"""The inboxes of a group on loopback, and connections that say what a test wants said."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from lockstep.ranks.group.control.following_inbox import FollowingInbox
from lockstep.ranks.group.control.frames import Connection
from lockstep.ranks.group.control.inbox import OpenInbox
from lockstep.ranks.group.control.leading_inbox import LeadingInbox
from lockstep.ranks.group.control.numbering import InboxBounds
from lockstep.ranks.protocol.host_port import split_address

PATIENCE_S = 30.0
"""What only an inbox takes that does not work."""
SECRET = b"known to all of the groups"

T = TypeVar("T")


class Inboxes:
    """The inboxes of all ranks of a group."""

    def __init__(
        self, ranks: int = 1, *, secret: bytes = b"", bounds: InboxBounds | None = None
    ) -> None:
        """With a secret, nobody reaches them by a relay."""
        self.secret = secret
        self.leading = LeadingInbox("127.0.0.1:0", secret=secret, world_size=ranks, bounds=bounds)
        self.following: list[FollowingInbox] = []

    def follow(self, rank: int, address: str = "") -> FollowingInbox:
        """Let a rank follow rank 0, at its own address or at another one that leads there."""
        address = address or self.leading.address
        inbox = FollowingInbox(address, secret=self.secret, rank=rank)
        self.following.append(inbox)
        return inbox

    def submit(self, *contents: bytes) -> "list[Future[int]]":
        """Let rank 0's process say something; return the number of each message."""
        return [self.leading.submit(each) for each in contents]

    def contents(self, count: int) -> list[list[bytes]]:
        """Wait until every rank has so many messages; return those of each, by rank."""
        every: list[OpenInbox] = [self.leading, *self.following]
        for inbox in every:
            assert inbox.wait(count, PATIENCE_S), f"{inbox.count} of {count} messages have come"
        return [[inbox.read(number) for number in range(1, count + 1)] for inbox in every]

    async def connection(self) -> Connection:
        """Return a connection to rank 0 after its handshake."""
        host, port = split_address(self.leading.address)
        return await Connection.to(host, port, bytes_max=1 << 20, secret=self.secret)

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
