"""The messages of a group by their numbers, kept on rank 0 until no rank needs them any more."""

from collections.abc import Iterable
from dataclasses import dataclass

from ....errors import MessageError
from ..member.messages import Backlog


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxBounds:
    """How much an inbox takes (rule R10)."""

    message_bytes: int = 8 << 20
    """Bytes of one message: a prompt of a million tokens has four million."""
    messages_waiting: int = 4096
    """Messages that wait until every rank has them and this rank's engine has taken them."""
    bytes_waiting: int = 64 << 20
    """Bytes of those."""
    greetings: int = 64
    """Connections at a time that have not shown yet that they know the secret; more are cut off."""


class Numbering:
    """Numbers messages, and keeps each until every rank has it. Owned by one thread.

    The backlog, which is this rank's own inbox, is told of each.
    """

    def __init__(self, bounds: InboxBounds, backlog: Backlog, followers: Iterable[int]) -> None:
        """`followers` are the ranks that have to have each message before it can be forgotten."""
        self._bounds = bounds
        self._backlog = backlog
        self._had = dict.fromkeys(followers, 0)
        self._kept: dict[int, bytes] = {}
        self._forgotten = 0
        self._bytes = 0

    @property
    def last(self) -> int:
        """The number of the last message."""
        return self._backlog.count

    def take(self, content: bytes) -> int:
        """Return the number that a message gets.

        Raises `MessageError`, and nothing is changed, for one that exceeds a bound.
        """
        self._require_room(content)
        number = self.last + 1
        self._kept[number] = content
        self._bytes += len(content)
        self._backlog.note(number, content)
        return number

    def read(self, number: int) -> bytes:
        """Return a message that is kept."""
        return self._kept[number]

    def require_follower(self, rank: int, had: int) -> None:
        """Raise `MessageError` unless a rank can go on from the messages that it says it has."""
        if rank not in self._had:
            raise MessageError(f"rank {rank} is not one that follows this inbox")
        if not self._had[rank] <= had <= self.last:
            raise MessageError(
                f"rank {rank} says that it has {had} messages, has said {self._had[rank]} and cannot"
                f" have more than {self.last}; a rank that has started anew is none of this group"
            )

    def reach(self, rank: int, had: int) -> None:
        """Note how many messages in a row a rank has; a level."""
        self._had[rank] = max(self._had[rank], min(had, self.last))

    def _require_room(self, content: bytes) -> None:
        bounds = self._bounds
        if len(content) > bounds.message_bytes:
            raise MessageError(
                f"a message of {len(content)} bytes, must be at most {bounds.message_bytes}"
            )
        self._forget()
        if len(self._kept) >= bounds.messages_waiting:
            raise MessageError(f"{len(self._kept)} messages wait, which is as many as may wait")
        if self._bytes + len(content) > bounds.bytes_waiting:
            raise MessageError(
                f"{self._bytes} bytes of messages wait, and with {len(content)} more they would be"
                f" more than {bounds.bytes_waiting}"
            )

    def _forget(self) -> None:
        """Forget what every rank has and this rank's engine has taken."""
        through = min([self._backlog.gone, *self._had.values()])
        for number in range(self._forgotten + 1, through + 1):
            self._bytes -= len(self._kept.pop(number))
            self._forgotten = number
