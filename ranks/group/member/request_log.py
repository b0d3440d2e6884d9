"""Control requests received by rank 0, and how they become commands (rule R14).

Rank 0 numbers control requests from 1 on. Each rank votes two numbers: the highest number that it knows
to be in use, and the number up to which it has received every control request. The verdict gives every
rank the highest number, so that the rank can fetch the missing control requests. Control requests that
every rank has received become commands in the same step on every rank.
"""

import threading
from collections.abc import Callable, Iterator

from ....errors import UsageError

CarryOut = Callable[[bytes], None]
"""Function that executes a control request given as bytes."""


class RequestLog:
    """The control requests received by this rank. Thread-safe.

    They may arrive in any order and more than once. The log has no limit; the sender must bound the
    number of control requests (rule R10).
    """

    def __init__(self, *, beyond_max: int = 1 << 16) -> None:
        """A control request is refused if its number exceeds `count` by more than `beyond_max`."""
        self._beyond_max = beyond_max
        self._changed = threading.Condition()
        self._kept: dict[int, bytes] = {}
        self._count = 0
        self._gone = 0

    @property
    def count(self) -> int:
        """Number of control requests received without a gap, counted from number 1; never falls."""
        return self._count

    @property
    def newest(self) -> int:
        """Number of the newest control request known to exist, received or not; never falls."""
        return self._count

    @property
    def waiting(self) -> int:
        """Number of control requests in memory: received and not yet deleted."""
        return len(self._kept)

    @property
    def gone(self) -> int:
        """The number up to which control requests were executed and deleted."""
        return self._gone

    def learn(self, newest: int) -> None:
        """Record that control requests up to number `newest` exist. Subclasses then fetch them."""

    def note(self, number: int, content: bytes) -> bool:
        """Store a control request; return False if it was known or its number is too far above `count`.

        Idempotent: the first content stored under a number is kept.
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
        """Return a control request; raise `UsageError` if it has not been received or was deleted."""
        with self._changed:
            content = self._kept.get(number)
            if content is None or number > self._count:
                raise UsageError(
                    f"request {number} is not available; {self._gone + 1} to {self._count} are"
                )
            return content

    def let_go(self, through: int) -> None:
        """Delete the control requests up to number `through`, which this rank has executed."""
        with self._changed:
            for number in range(self._gone + 1, min(through, self._count) + 1):
                del self._kept[number]
                self._gone = number

    def wait(self, count: int, timeout_s: float) -> bool:
        """Wait until control requests 1 to `count` have been received; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count >= count, timeout_s)


class AgreedRequests:
    """Executes control requests that have become commands. Owned by the engine's thread."""

    def __init__(self, log: RequestLog | None) -> None:
        self.log = log
        """The log of received control requests; None if this rank takes none."""
        self._agreed = 0
        self.handler: CarryOut | None = None
        """Function that executes a control request; None until one is registered."""

    def learn(self, newest: int) -> None:
        """Record `newest`, the highest number of a control request that any rank has voted."""
        if self.log is not None and newest > self.log.count:
            self.log.learn(newest)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a new control request; return at once if this rank takes none."""
        if self.log is not None:
            self.log.wait(self._agreed + 1, timeout_s)

    def agree(self, through: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield (number, content) of the control requests up to `through` that were not yielded yet.

        The content is None if this rank takes no control requests.
        """
        for number in range(self._agreed + 1, through + 1):
            self._agreed = number
            yield number, None if self.log is None else self.log.read(number)

    def carry_out(self, number: int, content: bytes | None) -> None:
        """Execute a control request that has become a command, then delete it from the log."""
        if self.log is None or content is None:
            return
        if self.handler is not None:
            self.handler(content)
        self.log.let_go(number)
