"""Requests that reach a group by rank 0, and how they become commands (rule R14).

Rank 0 numbers them from 1 on. A rank votes how many there are, as far as it knows, and how many it has
in a row. A verdict says how many there are, so a rank knows what it lacks, and how many every rank has:
these become commands, in the same step on every rank.
"""

import threading
from collections.abc import Callable, Iterator

from ....errors import UsageError

CarryOut = Callable[[bytes], None]
"""Carries out a request that has become a command."""


class RequestLog:
    """The requests that this rank has, in whatever order and however often they come. Thread-safe.

    Keeps what it is given: whoever gives it bounds that (rule R10).
    """

    def __init__(self, *, beyond_max: int = 1 << 16) -> None:
        """At most `beyond_max` requests are kept that wait for one before them."""
        self._beyond_max = beyond_max
        self._changed = threading.Condition()
        self._kept: dict[int, bytes] = {}
        self._count = 0
        self._gone = 0

    @property
    def count(self) -> int:
        """How many requests this rank has in a row, from number 1 on; it never falls."""
        return self._count

    @property
    def newest(self) -> int:
        """How many there are, as far as this rank knows; it never falls."""
        return self._count

    @property
    def waiting(self) -> int:
        """How many requests are here that were not let go of."""
        return len(self._kept)

    @property
    def gone(self) -> int:
        """Up to which number requests were let go of."""
        return self._gone

    def learn(self, newest: int) -> None:
        """Hear that there are so many: a log to which they are not brought begins to get them."""

    def note(self, number: int, content: bytes) -> bool:
        """Keep a request; False if it was here before, or is too far beyond those that are.

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
        """Return a request; raises `UsageError` for one that is not here, or was let go of."""
        with self._changed:
            content = self._kept.get(number)
            if content is None or number > self._count:
                raise UsageError(
                    f"request {number} is not here; from {self._gone + 1} to {self._count} are"
                )
            return content

    def let_go(self, through: int) -> None:
        """Keep the requests up to this number no longer: they were carried out here."""
        with self._changed:
            for number in range(self._gone + 1, min(through, self._count) + 1):
                del self._kept[number]
                self._gone = number

    def wait(self, count: int, timeout_s: float) -> bool:
        """Wait until so many requests are here in a row; False if they are not within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count >= count, timeout_s)


class AgreedRequests:
    """Carries out the requests that have become commands on this rank. Owned by the engine's thread."""

    def __init__(self, log: RequestLog | None) -> None:
        self.log = log
        """None where this rank takes no requests."""
        self._agreed = 0
        self.obeyed_by: CarryOut | None = None
        """What carries a request out."""

    def learn(self, newest: int) -> None:
        """Hear how many there are, as far as any rank knows."""
        if self.log is not None and newest > self.log.count:
            self.log.learn(newest)

    def wait(self, timeout_s: float) -> None:
        """Wait, up to a time, for a request that is no command yet; not at all where none is taken."""
        if self.log is not None:
            self.log.wait(self._agreed + 1, timeout_s)

    def agree(self, through: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield the requests up to a number that are commands now, each once and in their order."""
        for number in range(self._agreed + 1, through + 1):
            self._agreed = number
            yield number, None if self.log is None else self.log.read(number)

    def carry_out(self, number: int, content: bytes | None) -> None:
        """Carry out a request that has become a command, and let go of it."""
        if self.log is None or content is None:
            return
        if self.obeyed_by is not None:
            self.obeyed_by(content)
        self.log.let_go(number)
