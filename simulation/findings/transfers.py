"""Findings about orders and operations, and what they keep from use."""

from dataclasses import dataclass

from .finding import Finding


@dataclass(frozen=True, slots=True)
class BadOrder(Finding):
    """The executor cannot carry out an order."""

    rank: int
    who: str
    """What was ordered."""
    wrong: str
    """What is wrong with the order."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.who} {self.wrong}"


@dataclass(frozen=True, slots=True)
class Overdue(Finding):
    """An operation stands in a phase for longer than the phase may last."""

    kind: str
    operation: int
    phase: str
    stood_s: float
    limit_s: float

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.operation} stands in {self.phase} for {self.stood_s:.3f} s, and "
            f"{self.limit_s} s is its limit"
        )


@dataclass(frozen=True, slots=True)
class EngineNotKeptOut(Finding):
    """A load into an engine's own pages is quarantined, though the engine may use these pages."""

    operation: int

    def __str__(self) -> str:
        return (
            f"load {self.operation} is quarantined, and nobody can keep the engine from its pages"
        )


@dataclass(frozen=True, slots=True)
class WaitsForNothing(Finding):
    """A request waits for a copy that is over."""

    request: str
    operation: int | None
    """The operation that it waits for; None if all that is left is quarantined."""

    def __str__(self) -> str:
        waited = "a copy" if self.operation is None else f"load {self.operation}"
        return f"request {self.request} waits for {waited}, which is gone"


@dataclass(frozen=True, slots=True)
class NotLetGo(Finding):
    """At rest an operation is in flight, or a node is locked or pinned."""

    what: str
    state: str

    def __str__(self) -> str:
        return f"{self.what} is {self.state} at rest"
