"""Findings about what the cache has answered to its engine."""

from dataclasses import dataclass

from .finding import Finding


@dataclass(frozen=True, slots=True)
class OtherAnswer(Finding):
    """Two ranks have answered the same command differently."""

    command: str
    first: str
    rank: int
    answer: str

    def __str__(self) -> str:
        return (
            f"{self.command}: rank 0 answers {self.first}, rank {self.rank} answers {self.answer}"
        )


@dataclass(frozen=True, slots=True)
class ImpossibleAnswer(Finding):
    """An answer does not fit its question, or does not fit an answer given just before."""

    command: str
    """The name of the command, with its article."""
    said: str

    def __str__(self) -> str:
        return f"{self.command} {self.said}"


@dataclass(frozen=True, slots=True)
class NotKept(Finding):
    """The cache has lost tokens that it had to keep."""

    tokens: int
    why: str
    """Why these tokens must be there; the text goes on after the word "tokens"."""
    found: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens {self.why}, and a match finds {self.found} of them"


@dataclass(frozen=True, slots=True)
class WrongHit(Finding):
    """The cache tells a lending engine of more or fewer tokens to load than there are."""

    request: str
    device: int
    found: int
    hit: int
    when: str

    def __str__(self) -> str:
        return (
            f"request {self.request} has {self.device} tokens on the device, match finds {self.found} "
            f"on the host, and hit says {self.hit}, {self.when}"
        )


@dataclass(frozen=True, slots=True)
class NotRefused(Finding):
    """The cache has accepted a wrong call."""

    rank: int
    call: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.call} was not refused"


@dataclass(frozen=True, slots=True)
class RefusedAndChanged(Finding):
    """The cache has refused a call, and the call has changed something."""

    rank: int
    call: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.call} was refused, and changed something all the same"
