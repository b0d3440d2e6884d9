"""Findings about the group as a whole: its rounds, its end, and whether its ranks are equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Self

from .finding import Finding


@dataclass(frozen=True, slots=True)
class InvariantBroken(Finding):
    """An invariant of the replicated state does not hold."""

    rank: int
    number: int
    sentence: str

    def __str__(self) -> str:
        return f"rank {self.rank}: invariant {self.number}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class ReplicasDiffer(Finding):
    """The replicas of two ranks are not equal."""

    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class AheadOfTime(Finding):
    """The time that the ranks agree on is ahead of the clock of some rank."""

    agreed_ms: int
    rank: int
    clock_ms: int

    def __str__(self) -> str:
        return (
            f"the ranks agree on {self.agreed_ms} ms, and the clock of rank {self.rank} says "
            f"{self.clock_ms} ms"
        )


@dataclass(frozen=True, slots=True)
class Crashed(Finding):
    """The cache or an engine has raised an error that nobody expects."""

    error: str
    """The name of the error's class."""
    module: str
    line: int
    function: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return what is known of an `error` that was raised and caught."""
        frame = extract_tb(error.__traceback__)[-1]
        module = frame.filename.rsplit("/", 1)[-1]
        return cls(type(error).__name__, module, frame.lineno or 0, frame.name, str(error))

    def __str__(self) -> str:
        said = f": {self.message}" if self.message else ""
        return f"{self.error} at {self.module}:{self.line} in {self.function}{said}"


@dataclass(frozen=True, slots=True)
class WrongVotes(Finding):
    """A rank has not reached exactly one collective in a step."""

    rank: int
    count: int

    def __str__(self) -> str:
        return f"rank {self.rank} reached {self.count} collectives in one step"


@dataclass(frozen=True, slots=True)
class OtherShape(Finding):
    """A round has another shape than the rounds before it."""

    rank: int
    launched: tuple[str, int]
    others: tuple[str, int]

    def __str__(self) -> str:
        return f"rank {self.rank} launched a round of {self.launched}, others were {self.others}"


@dataclass(frozen=True, slots=True)
class EndedForNoReason(Finding):
    """A rank has ended the epoch though no fault had struck."""

    rank: int
    error: str
    """The name of the error's class."""
    message: str
    absent: int | None = None
    """A rank that did not come to the round that the others waited for."""
    difference: str | None = None
    """Where the replicas differ, if that is why the epoch ended."""

    def __str__(self) -> str:
        what = f"rank {self.rank} ends the epoch for no reason: {self.error}: {self.message}"
        if self.difference is not None:
            return f"{what}; {self.difference}"
        if self.absent is not None:
            return f"{what}; rank {self.absent} did not come to the round"
        return what


@dataclass(frozen=True, slots=True)
class NotNoticed(Finding):
    """A fault has struck a rank, and another rank did not notice it in time and by the right error."""

    fault: str
    struck: int
    rank: int
    raised: Sequence[str]
    """What each rank has raised, by rank, as `repr` writes it."""

    def __str__(self) -> str:
        return (
            f"{self.fault} struck rank {self.struck}, and rank {self.rank} raised "
            f"{self.raised[self.rank]} where the ranks raised {list(self.raised)}"
        )


@dataclass(frozen=True, slots=True)
class GoesOn(Finding):
    """A rank has taken a step or reached a collective after its group has ended."""

    rank: int
    does: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.does} after the epoch has ended"


@dataclass(frozen=True, slots=True)
class Restless(Finding):
    """A group without requests does not come to rest."""

    what: str
    steps: int

    def __str__(self) -> str:
        return f"{self.what} in {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Miscounted(Finding):
    """A rank has not counted as many rounds and collectives as steps."""

    rank: int
    steps: int
    rounds: int
    collectives: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} counts {self.steps} steps, {self.rounds} rounds and "
            f"{self.collectives} collectives"
        )
