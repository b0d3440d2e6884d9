"""Numbers for the messages of a group: each gets one, however often its sender repeats it."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ....errors import ConfigError
from ...messages import Backlog
from ..refusal import Refusal, Refused

SENDER_BYTES = 16
"""A sender is known by so many random bytes."""

SEQUENCE_SPAN = 256
"""A sender repeats no message that is so many behind its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxBounds:
    """How much an inbox takes (rule R10). What exceeds a bound is refused by name to its sender."""

    message_bytes: int = 8 << 20
    """Bytes of one message: a prompt of a million tokens has four million."""
    messages_waiting: int = 4096
    """Messages that wait until every rank has them and this rank's engine has taken them."""
    bytes_waiting: int = 64 << 20
    """Bytes of those."""
    senders: int = 1024
    """Senders whose repetitions are known; the one that was silent for the longest is forgotten."""
    connections: int = 256
    """Senders and ranks that are connected at a time."""
    greetings: int = 64
    """Connections at a time that have not shown yet that they know the secret; more are cut off."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 < value < 1 << 31:
                raise ConfigError(f"{name} of an inbox is {value}, must be 1 to {(1 << 31) - 1}")
        if self.bytes_waiting < self.message_bytes:
            raise ConfigError(
                f"bytes_waiting of an inbox is {self.bytes_waiting}, less than one message of"
                f" {self.message_bytes}"
            )


@dataclass(slots=True)
class _Repeatable:
    """The last messages of one sender."""

    highest: int = 0
    numbers: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """The number that each sequence number got, of the last `SEQUENCE_SPAN`."""


class Numbering:
    """Numbers messages and keeps them until nobody needs them. Owned by one thread.

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
        self._senders: OrderedDict[bytes, _Repeatable] = OrderedDict()

    @property
    def last(self) -> int:
        """The number of the last message."""
        return self._backlog.count

    def take(self, sender: bytes, sequence: int, content: bytes) -> int:
        """Return the number of a message, which it gets now unless it has come before.

        Raises `Refused`, and nothing is changed, for one that exceeds a bound.
        """
        if len(sender) != SENDER_BYTES or sequence < 1:
            raise Refused(Refusal.MALFORMED, f"{len(sender)} bytes and {sequence} name no message")
        known = self._senders.get(sender) or _Repeatable()
        if sender in self._senders:
            self._senders.move_to_end(sender)
        number = known.numbers.get(sequence)
        if number is not None:
            return number
        if sequence <= known.highest - SEQUENCE_SPAN:
            raise Refused(
                Refusal.FORGOTTEN,
                f"message {sequence} of a sender comes after its message {known.highest}, and nobody"
                " knows any more whether it came before",
            )
        self._require_room(content)
        number = self.last + 1
        self._kept[number] = content
        self._bytes += len(content)
        self._backlog.note(number, content)
        self._remember(sender, known, sequence, number)
        return number

    def read(self, number: int) -> bytes:
        """Return a message that is kept."""
        return self._kept[number]

    def require_follower(self, rank: int, had: int) -> None:
        """Raise `Refused` unless a rank can go on from the messages that it says it has."""
        if rank not in self._had:
            raise Refused(Refusal.STRANGER, f"rank {rank} is not one that follows this inbox")
        if not self._had[rank] <= had <= self.last:
            raise Refused(
                Refusal.STRANGER,
                f"rank {rank} says that it has {had} messages, has said {self._had[rank]} and cannot"
                f" have more than {self.last}; a rank that has started anew is none of this group",
            )

    def reach(self, rank: int, had: int) -> None:
        """Note how many messages in a row a rank has; a level."""
        self._had[rank] = max(self._had[rank], min(had, self.last))

    def _require_room(self, content: bytes) -> None:
        bounds = self._bounds
        if len(content) > bounds.message_bytes:
            raise Refused(
                Refusal.TOO_LARGE,
                f"a message of {len(content)} bytes, must be at most {bounds.message_bytes}",
            )
        self._forget()
        if len(self._kept) >= bounds.messages_waiting:
            raise Refused(
                Refusal.FULL, f"{len(self._kept)} messages wait, which is as many as may wait"
            )
        if self._bytes + len(content) > bounds.bytes_waiting:
            raise Refused(
                Refusal.FULL,
                f"{self._bytes} bytes of messages wait, and with {len(content)} more they would be"
                f" more than {bounds.bytes_waiting}",
            )

    def _forget(self) -> None:
        """Forget what every rank has and this rank's engine has taken."""
        through = min([self._backlog.gone, *self._had.values()])
        for number in range(self._forgotten + 1, through + 1):
            self._bytes -= len(self._kept.pop(number))
            self._forgotten = number

    def _remember(self, sender: bytes, known: _Repeatable, sequence: int, number: int) -> None:
        known.numbers[sequence] = number
        known.highest = max(known.highest, sequence)
        for old in [each for each in known.numbers if each <= known.highest - SEQUENCE_SPAN]:
            del known.numbers[old]
        self._senders[sender] = known
        if len(self._senders) > self._bounds.senders:
            self._senders.popitem(last=False)
