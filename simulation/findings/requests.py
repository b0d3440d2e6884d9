"""Findings about requests that reach single ranks and become commands."""

from dataclasses import dataclass

from .finding import Finding, Said


@dataclass(frozen=True, slots=True)
class OtherRequest(Finding):
    """The ranks have carried out a request in other words than it was sent in, or not in its turn."""

    number: int
    sent: bytes
    told: bytes

    def say(self) -> Said:
        return Said(
            f"request {self.number} was sent as {self.sent!r} and carried out as {self.told!r}",
            f"The ranks act on request {self.number} in other words than it was sent in,"
            " or act on another one in its place.",
        )


@dataclass(frozen=True, slots=True)
class HeardEarly(Finding):
    """The ranks have carried out a request that one of them did not have yet."""

    number: int
    rank: int

    def say(self) -> Said:
        return Said(
            f"request {self.number} became a command before rank {self.rank} had it",
            f"The ranks act on request {self.number} before rank {self.rank} has received"
            " it, so they cannot all do the same.",
        )


@dataclass(frozen=True, slots=True)
class NotHeard(Finding):
    """Every rank has a request, and they are not told of it."""

    number: int

    def say(self) -> Said:
        return Said(
            f"every rank has request {self.number}, and it does not become a command",
            f"Every rank has received request {self.number} and none of them acts on it,"
            " so whoever sent it waits for ever.",
        )
