"""Messages that reach a rank from outside of its group, and how they become commands (rule R14).

Whoever numbers the messages of a group hands every rank the same ones, from number 1 on, at any time
and in any order. A rank votes how many it has in a row, and once a verdict says that all have them, the
engine is told of them, in the same step on every rank.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from ....errors import UsageError

CONTROL_MAGIC = b"LKOP\x01"
"""How a message begins that asks the cache itself for something."""
CarryOut = Callable[[int, bytes], bool]
"""Carries out message number so and so, if it is a request to the cache itself; says whether it was."""


class Inbox(Protocol):
    """The messages that have reached this rank. Thread-safe; none of its methods waits but `wait`."""

    @property
    def count(self) -> int:
        """How many messages this rank has had in a row, from number 1 on; it never falls."""
        ...

    def read(self, number: int) -> bytes:
        """Return a message that is here and was not let go of."""
        ...

    def let_go(self, through: int) -> None:
        """Keep the messages up to this number no longer: the engine has them."""
        ...

    def wait(self, count: int, timeout_s: float) -> bool:
        """Wait until so many messages are here in a row; False if they are not within `timeout_s`."""
        ...


class Backlog:
    """Messages by their numbers, in whatever order and however often they come. Thread-safe.

    Keeps what it is given: whoever hands messages on bounds them (`beyond_max`, rule R10).
    """

    def __init__(self, *, beyond_max: int = 1 << 16) -> None:
        """At most `beyond_max` messages are kept that wait for one before them."""
        self._beyond_max = beyond_max
        self._changed = threading.Condition()
        self._kept: dict[int, bytes] = {}
        self._count = 0
        self._gone = 0

    @property
    def count(self) -> int:
        """See `Inbox`."""
        return self._count

    @property
    def waiting(self) -> int:
        """How many messages are here that were not let go of."""
        return len(self._kept)

    @property
    def gone(self) -> int:
        """Up to which number messages were let go of."""
        return self._gone

    def note(self, number: int, content: bytes) -> bool:
        """Keep a message; False if it was here before, or is too far beyond those that are.

        A level: what was noted stays as it was first, and to note it again changes nothing.
        """
        with self._changed:
            beyond = number - self._count
            if beyond < 1 or beyond > self._beyond_max or number in self._kept:
                return False
            self._kept[number] = content
            while self._count + 1 in self._kept:
                self._count += 1
            self._changed.notify_all()
            return True

    def read(self, number: int) -> bytes:
        """See `Inbox`. Raises `UsageError` for a message that is not here."""
        with self._changed:
            content = self._kept.get(number)
            if content is None or number > self._count:
                raise UsageError(
                    f"message {number} is not here; from {self._gone + 1} to {self._count} are"
                )
            return content

    def let_go(self, through: int) -> None:
        """See `Inbox`."""
        with self._changed:
            for number in range(self._gone + 1, min(through, self._count) + 1):
                del self._kept[number]
                self._gone = number

    def wait(self, count: int, timeout_s: float) -> bool:
        """Wait until so many messages are here in a row; False if they are not within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count >= count, timeout_s)


class AgreedMessages:
    """The messages that have become commands on this rank and that its engine has not taken yet.

    Owned by the engine's thread; the inbox alone is fed by others.
    """

    def __init__(self, inbox: Inbox | None) -> None:
        self._inbox = inbox
        self._heard = 0
        self._taken = 0
        self._carried_out: set[int] = set()
        """Those that were for the cache, and which the engine is not told of."""
        self.carry_out: CarryOut | None = None
        """Where it is set, what is for the cache itself is carried out by it."""

    @property
    def count(self) -> int | None:
        """What this rank votes: how many messages it has in a row; None without an inbox."""
        return None if self._inbox is None else self._inbox.count

    def wait(self, timeout_s: float) -> None:
        """Wait, up to a time, for a message that is no command yet; not at all without an inbox."""
        if self._inbox is not None:
            self._inbox.wait(self._heard + 1, timeout_s)

    def agree(self, through: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield the messages up to a number that are commands now, each once and in their order."""
        for number in range(self._heard + 1, through + 1):
            self._heard = number
            yield number, None if self._inbox is None else self._inbox.read(number)

    def obey(self, number: int, content: bytes | None) -> None:
        """Carry out a message that has become a command, if it is one for the cache."""
        if self.carry_out is None or content is None or not self.carry_out(number, content):
            return
        self._carried_out.add(number)
        if number == self._taken + 1:
            # An engine that expects no messages takes none.
            self.take()

    def take(self) -> tuple[bytes, ...]:
        """Return the messages that were agreed on since the last call; the inbox lets go of them."""
        if self._inbox is None or self._taken == self._heard:
            return ()
        numbers = range(self._taken + 1, self._heard + 1)
        taken = tuple(self._inbox.read(each) for each in numbers if each not in self._carried_out)
        self._carried_out.clear()
        self._taken = self._heard
        self._inbox.let_go(self._taken)
        return taken
