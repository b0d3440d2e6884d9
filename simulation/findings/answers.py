"""Findings about what the cache has answered to its engine."""

from dataclasses import dataclass

from .finding import Finding, Said


@dataclass(frozen=True, slots=True)
class OtherAnswer(Finding):
    """Two ranks have answered the same command differently."""

    command: str
    first: str
    rank: int
    answer: str

    def say(self) -> Said:
        return Said(
            f"{self.command}: rank 0 answers {self.first}, rank {self.rank} answers {self.answer}",
            f"Ranks 0 and {self.rank} gave different answers to the same call ({self.command}), so they"
            " would go on with different work.",
        )


@dataclass(frozen=True, slots=True)
class ImpossibleAnswer(Finding):
    """An answer does not fit its question, or does not fit an answer given just before."""

    command: str
    """The name of the command, with its article."""
    said: str

    def say(self) -> Said:
        return Said(
            f"{self.command} {self.said}",
            f"The cache gave {self.command} an answer that does not fit what it was asked, or what it"
            " said right before, so the engine would go on with pages that are not there.",
        )


@dataclass(frozen=True, slots=True)
class NotKept(Finding):
    """The cache has lost tokens that it had to keep."""

    tokens: int
    why: str
    """Why these tokens must be there; the text goes on after the word "tokens"."""
    found: int

    def say(self) -> Said:
        return Said(
            f"{self.tokens} tokens {self.why}, and a match finds {self.found} of them",
            f"The cache has lost part of what it had to keep: {self.tokens} tokens {self.why}, and"
            f" {self.found} of them are left.",
        )


@dataclass(frozen=True, slots=True)
class WrongHit(Finding):
    """The cache tells a lending engine of more or fewer tokens to load than there are."""

    request: str
    device: int
    found: int
    hit: int
    when: str

    def say(self) -> Said:
        return Said(
            f"request {self.request} has {self.device} tokens on the device, match finds {self.found} "
            f"on the host, and hit says {self.hit}, {self.when}",
            f"The cache offers request {self.request} to load {self.hit} tokens, {self.when}, and that"
            " is not what it should have for it.",
        )


@dataclass(frozen=True, slots=True)
class NotRefused(Finding):
    """The cache has accepted a wrong call."""

    rank: int
    call: str

    def say(self) -> Said:
        return Said(
            f"rank {self.rank}: {self.call} was not refused",
            f"Rank {self.rank} takes a call that makes no sense ({self.call}) for a good one.",
        )


@dataclass(frozen=True, slots=True)
class RefusedAndChanged(Finding):
    """The cache has refused a call, and the call has changed something."""

    rank: int
    call: str

    def say(self) -> Said:
        return Said(
            f"rank {self.rank}: {self.call} was refused, and changed something all the same",
            f"Rank {self.rank} refused a call ({self.call}) and changed something all the same, so the"
            " engine has another picture of it than is true.",
        )
