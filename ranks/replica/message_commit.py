"""Commit of external messages: how many every rank has, and which have become commands.

A message reaches each rank at a different time (rule R14). It is numbered outside the replica, and each
rank votes how many consecutive messages it has. All messages up to the verdict's number become
commands, applied in the same step on every rank. A hash of each enters the digest, so ranks with
different bytes are detected.
"""

from hashlib import sha256

from ...errors import UsageError
from ..protocol.effects import Outbox
from .core.journal import Journal


class MessageCommit:
    """Counts the messages of an epoch, starting with number 1."""

    def __init__(self, journal: Journal, outbox: Outbox) -> None:
        self.agreed = 0
        """Every rank has the messages up to this number."""
        self.heard = 0
        """The messages up to this number have become commands."""
        self._journal = journal
        self._outbox = outbox

    def reach(self, number: int) -> None:
        """Apply the number of consecutive messages on every rank; it never decreases."""
        if number > self.agreed:
            self.agreed = self._outbox.requests = number

    def hear(self, number: int, content: bytes | None) -> None:
        """Apply a message as a command; `content` is None on a rank that has no inbox.

        Raises `UsageError`, and changes nothing, unless it is the next message and every rank has it.
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
