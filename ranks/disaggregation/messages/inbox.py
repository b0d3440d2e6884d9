"""The inboxes of a group: how messages reach its ranks, whom they come from, and in which order.

Senders (other groups, routers) reach rank 0, which gives each message a number and hands it on to the
other ranks, all over TCP and outside of any collective. A sender hears that its message was taken once
it has its number. What every rank has becomes a command by a verdict (`ranks/messages.py`): rank 0
alone decides the order, and nobody the step.
"""

import secrets
from dataclasses import dataclass, field
from typing import Protocol

import msgpack

from ....coordinator.bootstrap import agree_that_all_are_ready
from ....coordinator.collective import Collective
from ....errors import LockstepError
from ....storage_backends.host_port import require_secret, split_address
from ...messages import Inbox
from .following_inbox import FollowingInbox
from .leading_inbox import LeadingInbox
from .numbering import InboxBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxSettings:
    """Where a group takes messages, and from whom."""

    address: str = "127.0.0.1:0"
    """Where rank 0 listens, as host:port or [host]:port; port 0 stands for any that is free."""
    told_address: str = ""
    """Where others reach rank 0 if it listens elsewhere: on `0.0.0.0`, or behind a forwarded port."""
    secret: bytes = field(default=b"", repr=False)
    """What all groups and routers have in common. Where the address is not this machine's own it must
    be there, with 16 bytes or more."""
    bounds: InboxBounds = field(default_factory=InboxBounds)

    def __post_init__(self) -> None:
        for address in filter(None, (self.address, self.told_address)):
            host, _ = split_address(address)
            require_secret(host, self.secret)


class OpenInbox(Inbox, Protocol):
    """The inbox of one rank, which its cache is opened with. It ends with the group."""

    @property
    def address(self) -> str:
        """Where senders reach the group, on every rank alike."""
        ...

    def close(self) -> None:
        """Take no more messages, and end all connections. Idempotent."""
        ...


def open_inbox(settings: InboxSettings, collective: Collective, timeout_s: float) -> OpenInbox:
    """Return this rank's inbox; rank 0 listens, and the others have reached it.

    Collective, as a part of the start of a group: every rank calls it at the same point. Raises the
    same `ConfigError` on every rank if rank 0 cannot listen or another cannot reach it.
    """
    leading: LeadingInbox | None = None
    problem: str | None = None
    if collective.rank == 0:
        try:
            leading = LeadingInbox(
                settings.address,
                told_address=settings.told_address,
                secret=settings.secret,
                bounds=settings.bounds,
                life=secrets.token_bytes(16),
                world_size=collective.world_size,
            )
        except LockstepError as error:
            problem = str(error)
    where: bytes = msgpack.packb([leading.address, leading.life] if leading else None)
    opened: LeadingInbox | FollowingInbox | None = leading
    try:
        told: tuple[str, bytes] | None = msgpack.unpackb(
            collective.gather(where, timeout_s)[0], use_list=False
        )
        if told is not None and leading is None:
            opened, problem = _followed(settings, collective.rank, told, timeout_s)
        agree_that_all_are_ready(collective, problem, timeout_s)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    assert opened is not None
    return opened


def _followed(
    settings: InboxSettings, rank: int, told: tuple[str, bytes], timeout_s: float
) -> tuple[FollowingInbox | None, str | None]:
    """Return the inbox of a rank that has reached rank 0, or why there is none."""
    address, life = told
    inbox: FollowingInbox | None = None
    try:
        inbox = FollowingInbox(
            address, secret=settings.secret, bounds=settings.bounds, life=life, rank=rank
        )
        inbox.require_connected(timeout_s)
    except LockstepError as error:
        if inbox is not None:
            inbox.close()
        return None, str(error)
    return inbox, None
