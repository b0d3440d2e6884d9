"""Findings about requests that reach single ranks and become commands."""

from dataclasses import dataclass

from .finding import Finding


@dataclass(frozen=True, slots=True)
class OtherRequest(Finding):
    """The ranks have carried out a request in other words than it was sent in, or not in its turn."""

    number: int
    sent: bytes
    told: bytes

    def __str__(self) -> str:
        return f"request {self.number} was sent as {self.sent!r} and carried out as {self.told!r}"


@dataclass(frozen=True, slots=True)
class HeardEarly(Finding):
    """The ranks have carried out a request that one of them did not have yet."""

    number: int
    rank: int

    def __str__(self) -> str:
        return f"request {self.number} became a command before rank {self.rank} had it"


@dataclass(frozen=True, slots=True)
class NotHeard(Finding):
    """Every rank has a request, and they are not told of it."""

    number: int

    def __str__(self) -> str:
        return f"every rank has request {self.number}, and it does not become a command"
