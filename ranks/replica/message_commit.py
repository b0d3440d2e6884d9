"""Commit of external messages (control requests): commands once every rank has received them.

A message reaches each rank at a different time (rule R14). Messages are numbered outside the replica,
and each rank votes the number up to which it has all messages. All messages up to the number in the
verdict become commands, applied in the same step on every rank. A hash of each message enters the
digest, so that a rank with different bytes is detected.
"""

from hashlib import sha256

from ...errors import UsageError
from ..protocol.effects import Outbox
from .core.journal import Journal


class MessageCommit:
    """Counts the external messages (control requests) of an epoch; the first has number 1."""

    def __init__(self, journal: Journal, outbox: Outbox) -> None:
        self.agreed = 0
        """The number up to which every rank has all messages."""
        self.committed = 0
        """The number of the last message that became a command."""
        self._journal = journal
        self._outbox = outbox

    def reach(self, number: int) -> None:
        """Record that every rank has all messages up to `number`; ignore a lower number."""
        if number > self.agreed:
            self.agreed = self._outbox.requests = number

    def commit(self, number: int, content: bytes | None) -> None:
        """Apply an external message as a command by recording its hash.

        `content` is None on a rank that does not receive messages. Raises `UsageError`, and changes
        nothing, unless the message is the next one and every rank has it.
        """
        if number != self.committed + 1:
            raise UsageError(f"message {number} does not follow message {self.committed}")
        if number > self.agreed:
            raise UsageError(
                f"message {number} is not on every rank; those up to {self.agreed} are"
            )
        self.committed = number
        digest = None if content is None else sha256(content).hexdigest()
        self._journal.record("message", number, digest)
