"""The inboxes of a group: how messages of rank 0's process reach every rank, outside of any collective.

Rank 0 gives each message a number and hands it on to the other ranks over TCP. What every rank has
becomes a command by a verdict (`ranks/group/member/messages.py`): rank 0 alone decides the order, no
rank the step.
"""

import platform
import secrets
from typing import Protocol

import msgpack

from ....coordinator.bootstrap import agree_that_all_are_ready
from ....coordinator.collective import Collective
from ....errors import LockstepError
from ...protocol.host_port import joined_address
from ..member.messages import Inbox
from .following_inbox import FollowingInbox
from .leading_inbox import LeadingInbox

_SECRET_BYTES = 32
_LOOPBACK = "127.0.0.1"


class OpenInbox(Inbox, Protocol):
    """The inbox of one rank, which its cache is opened with. It ends with the group."""

    def close(self) -> None:
        """Take no more messages, and end all connections. Idempotent."""
        ...


def open_inbox(collective: Collective, timeout_s: float, *, host: str = "") -> OpenInbox:
    """Return this rank's inbox; rank 0 listens, and the others have reached it.

    Rank 0 listens at `host`; by default at loopback if all ranks are on one host, else at its host's
    name. It draws a secret, which no one but the ranks has. Collective, as a part of the start of a
    group: every rank calls it at the same point. Raises the same `ConfigError` on every rank if rank 0
    cannot listen or another cannot reach it.
    """
    hosts = [each.decode() for each in collective.gather(platform.node().encode(), timeout_s)]
    host = host or (_LOOPBACK if len(set(hosts)) == 1 else hosts[0])
    leading: LeadingInbox | None = None
    problem: str | None = None
    secret = secrets.token_bytes(_SECRET_BYTES)
    if collective.rank == 0:
        try:
            address, ranks = joined_address(host, 0), collective.world_size
            leading = LeadingInbox(address, secret=secret, world_size=ranks)
        except LockstepError as error:
            problem = str(error)
    where: bytes = msgpack.packb([leading.address, secret] if leading else None)
    opened: LeadingInbox | FollowingInbox | None = leading
    try:
        told: tuple[str, bytes] | None = msgpack.unpackb(
            collective.gather(where, timeout_s)[0], use_list=False
        )
        if told is not None and leading is None:
            opened, problem = _followed(*told, collective.rank, timeout_s)
        agree_that_all_are_ready(collective, problem, timeout_s)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    assert opened is not None
    return opened


def _followed(
    address: str, secret: bytes, rank: int, timeout_s: float
) -> tuple[FollowingInbox | None, str | None]:
    """Return the inbox of a rank that has reached rank 0, or why there is none."""
    inbox = FollowingInbox(address, secret=secret, rank=rank)
    try:
        inbox.require_connected(timeout_s)
    except LockstepError as error:
        inbox.close()
        return None, str(error)
    return inbox, None
