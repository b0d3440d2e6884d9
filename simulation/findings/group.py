"""Findings about the group as a whole: its rounds, its end, and whether its ranks are equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Self

from .finding import Finding, Said

_INVARIANTS = {
    1: "The cache has lost track of which of its entries continues which",
    2: "The cache keeps an entry that nothing is cached under and nothing uses",
    3: "The cache keeps the window or state of a prefix of which it has dropped the KV",
    4: "The cache keeps the end of a prefix of which it has dropped the beginning",
    5: "The cache has lost count of who uses what it keeps: it may delete what is in use, or never give"
    " back what nobody uses",
    6: "The cache has lost count of what it keeps and of what may be evicted",
    7: "A page of memory belongs to two owners, so one would be overwritten with the data of the other,"
    " or to nobody, so that it can never be used again",
    8: "A transfer is using a cached prefix that was deleted or changed under it",
    9: "The cache has lost count of the transfers under way, so it will refuse others for ever",
}
"""What it means that an invariant is broken, by its number in `docs/architecture.md`."""

_DIFFER = (
    "The ranks no longer agree on what is cached and which pages are free: from here on they give the"
    " same request different pages."
)
_CRASHES = {
    (
        "loading_back.py",
        "begin",
    ): "to load a cached prefix back from host memory, and some of its pages"
    " are not there any more",
    (
        "tree.py",
        "keys",
    ): "to name the pages of a cached prefix, and found the entry deleted from the"
    " cache while it was still in use",
}
"""What the cache was about to do when it raised, by module and function."""


@dataclass(frozen=True, slots=True)
class InvariantBroken(Finding):
    """An invariant of the replicated state does not hold."""

    rank: int
    number: int
    sentence: str

    def say(self) -> Said:
        return Said(
            f"rank {self.rank}: invariant {self.number}: {self.sentence}",
            f"{_INVARIANTS.get(self.number, 'The cache has broken one of its own rules')}.",
        )


@dataclass(frozen=True, slots=True)
class ReplicasDiffer(Finding):
    """The replicas of two ranks are not equal."""

    what: str

    def say(self) -> Said:
        return Said(self.what, _DIFFER)


@dataclass(frozen=True, slots=True)
class AheadOfTime(Finding):
    """The time that the ranks agree on is ahead of the clock of some rank."""

    agreed_ms: int
    rank: int
    clock_ms: int

    def say(self) -> Said:
        return Said(
            f"the ranks agree on {self.agreed_ms} ms, and the clock of rank {self.rank} says "
            f"{self.clock_ms} ms",
            f"The ranks go by a time that rank {self.rank} has not reached yet, so what has a deadline"
            " ends before its time.",
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

    def say(self) -> Said:
        said = f": {self.message}" if self.message else ""
        doing = _CRASHES.get((self.module, self.function))
        if doing is not None:
            plain = f"The cache crashed on every rank: it was {doing}."
        else:
            saying = f", saying: {self.message.rstrip('.')}" if self.message else ""
            plain = f"The cache crashed in {self.module} with {self.error}{saying}."
        return Said(f"{self.error} at {self.module}:{self.line} in {self.function}{said}", plain)


@dataclass(frozen=True, slots=True)
class WrongVotes(Finding):
    """A rank has not reached exactly one collective in a step."""

    rank: int
    count: int

    def say(self) -> Said:
        return Said(
            f"rank {self.rank} reached {self.count} collectives in one step",
            f"Rank {self.rank} took part in {self.count} votes in one step where every rank must take"
            " part in exactly one: ranks that vote would wait for those that do not.",
        )


@dataclass(frozen=True, slots=True)
class OtherShape(Finding):
    """A round has another shape than the rounds before it."""

    rank: int
    launched: tuple[str, int]
    others: tuple[str, int]

    def say(self) -> Said:
        return Said(
            f"rank {self.rank} launched a round of {self.launched}, others were {self.others}",
            f"Rank {self.rank} votes in another form than the ranks did before, so they hang or read"
            " something else than was said.",
        )


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

    def say(self) -> Said:
        what = f"rank {self.rank} ends the epoch for no reason: {self.error}: {self.message}"
        if self.difference is not None:
            return Said(f"{what}; {self.difference}", _DIFFER)
        if self.absent is not None:
            return Said(
                what,
                f"Rank {self.absent} did not come to the vote that every rank takes part in at every"
                " step, and the others waited for it until they gave up: the group hangs.",
            )
        plain = f"Rank {self.rank} gives up the group although nothing has happened to it."
        return Said(what, plain)


@dataclass(frozen=True, slots=True)
class NotNoticed(Finding):
    """A fault has struck a rank, and another rank did not notice it in time and by the right error."""

    fault: str
    struck: int
    rank: int
    raised: Sequence[str]
    """What each rank has raised, by rank, as `repr` writes it."""

    def say(self) -> Said:
        return Said(
            f"{self.fault} struck rank {self.struck}, and rank {self.rank} raised "
            f"{self.raised[self.rank]} where the ranks raised {list(self.raised)}",
            f"Something happened to rank {self.struck} that ends the group, and rank {self.rank} did"
            " not notice it in time, or took it for something else.",
        )


@dataclass(frozen=True, slots=True)
class GoesOn(Finding):
    """A rank has taken a step or reached a collective after its group has ended."""

    rank: int
    does: str

    def say(self) -> Said:
        return Said(
            f"rank {self.rank} {self.does} after the epoch has ended",
            f"Rank {self.rank} goes on after its group has ended, so it would wait for ranks that are"
            " gone.",
        )


@dataclass(frozen=True, slots=True)
class Restless(Finding):
    """A group without requests does not come to rest."""

    what: str
    steps: int

    def say(self) -> Said:
        return Said(
            f"{self.what} in {self.steps} steps",
            f"Nobody asks anything of the cache any more, and it is still busy {self.steps} steps"
            " later.",
        )


@dataclass(frozen=True, slots=True)
class Miscounted(Finding):
    """A rank has not counted as many rounds and collectives as steps."""

    rank: int
    steps: int
    rounds: int
    collectives: int

    def say(self) -> Said:
        return Said(
            f"rank {self.rank} counts {self.steps} steps, {self.rounds} rounds and "
            f"{self.collectives} collectives",
            f"Rank {self.rank} did not vote exactly once in every step, by its own count.",
        )
