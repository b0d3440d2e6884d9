"""Findings about messages that reach single ranks and become commands."""

from dataclasses import dataclass

from .finding import Finding, Said


@dataclass(frozen=True, slots=True)
class OtherMessage(Finding):
    """The ranks were told of a message in other words than it was sent in, or not in its turn."""

    number: int
    sent: bytes
    told: bytes

    def say(self) -> Said:
        return Said(
            f"message {self.number} was sent as {self.sent!r} and told as {self.told!r}",
            f"The ranks act on message {self.number} from outside in other words than it was sent in,"
            " or act on another one in its place.",
        )


@dataclass(frozen=True, slots=True)
class HeardEarly(Finding):
    """The ranks were told of a message that one of them did not have yet."""

    number: int
    rank: int

    def say(self) -> Said:
        return Said(
            f"message {self.number} became a command before rank {self.rank} had it",
            f"The ranks act on message {self.number} from outside before rank {self.rank} has received"
            " it, so they cannot all do the same.",
        )


@dataclass(frozen=True, slots=True)
class NotHeard(Finding):
    """Every rank has a message, and they are not told of it."""

    number: int

    def say(self) -> Said:
        return Said(
            f"every rank has message {self.number}, and it does not become a command",
            f"Every rank has received message {self.number} from outside and none of them acts on it,"
            " so whoever sent it waits for ever.",
        )
