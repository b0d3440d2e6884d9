"""Messages from outside of the group: how many every rank has, and which have become commands.

A message reaches single ranks at any time (rule R14). It gets a number outside of the replica, and
each rank votes how many it has in a row. The verdict's number is a level: what every rank has once, it
has for ever. From then on the message is a command, which every rank gives in the same step, and its
bytes enter the digest as a hash: ranks that were handed different ones are found by its number.
"""

from hashlib import sha256

from ...errors import UsageError
from ..protocol.effects import Outbox
from .core.journal import Journal


class Hearing:
    """Counts the messages of an epoch, which begin with number 1."""

    def __init__(self, journal: Journal, outbox: Outbox) -> None:
        self.agreed = 0
        """Every rank has the messages up to this number."""
        self.heard = 0
        """Those up to this number have become commands."""
        self._journal = journal
        self._outbox = outbox

    def reach(self, number: int) -> None:
        """Apply how many messages in a row every rank has; what is not more changes nothing."""
        if number > self.agreed:
            self.agreed = self._outbox.requests = number

    def hear(self, number: int, content: bytes | None) -> None:
        """Let a message be a command; None is the content on a rank that has no inbox.

        Raises `UsageError`, and changes nothing, unless it is the next one and every rank has it.
        """
        if number != self.heard + 1:
            raise UsageError(f"message {number} does not follow message {self.heard}")
        if number > self.agreed:
            raise UsageError(
                f"message {number} is not on every rank; those up to {self.agreed} are"
            )
        self.heard = number
        digest = None if content is None else sha256(content).hexdigest()
        self._journal.record("message", number, digest)
