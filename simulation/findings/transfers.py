"""Findings about orders and operations, and what they keep from use."""

from dataclasses import dataclass

from .finding import Finding, Said

_KINDS = {
    "PREFETCH": "transfer from storage",
    "BACKUP": "copy to host memory",
    "LOAD_BACK": "copy to the device",
    "PERSIST": "write to storage",
}


@dataclass(frozen=True, slots=True)
class BadOrder(Finding):
    """The executor cannot carry out an order."""

    rank: int
    who: str
    """What was ordered."""
    wrong: str
    """What is wrong with the order, in plain words."""

    def say(self) -> Said:
        return Said(
            f"rank {self.rank}: {self.who} {self.wrong}",
            f"On rank {self.rank} something is to be moved and cannot be: {self.who} {self.wrong}.",
        )


@dataclass(frozen=True, slots=True)
class Overdue(Finding):
    """An operation stands in a phase for longer than the phase may last."""

    kind: str
    operation: int
    phase: str
    stood_s: float
    limit_s: float

    def say(self) -> Said:
        return Said(
            f"{self.kind} {self.operation} stands in {self.phase} for {self.stood_s:.3f} s, and "
            f"{self.limit_s} s is its limit",
            f"A {_KINDS.get(self.kind, 'transfer')} does not end although its time is up, so what waits"
            " for it waits for ever.",
        )


@dataclass(frozen=True, slots=True)
class EngineNotKeptOut(Finding):
    """A load into an engine's own pages is quarantined, though the engine may use these pages."""

    operation: int

    def say(self) -> Said:
        return Said(
            f"load {self.operation} is quarantined, and nobody can keep the engine from its pages",
            "A copy into the engine's own memory does not end, and the engine may use the memory all"
            " the same, so it would compute with wrong data.",
        )


@dataclass(frozen=True, slots=True)
class WaitsForNothing(Finding):
    """A request waits for a copy that is over."""

    request: str
    operation: int | None
    """The operation that it waits for; None if all that is left is quarantined."""

    def say(self) -> Said:
        waited = "a copy" if self.operation is None else f"load {self.operation}"
        return Said(
            f"request {self.request} waits for {waited}, which is gone",
            f"Request {self.request} waits for a copy that has ended long ago, so it waits for ever.",
        )


@dataclass(frozen=True, slots=True)
class NotLetGo(Finding):
    """At rest an operation is in flight, or a node is locked or pinned."""

    what: str
    state: str

    def say(self) -> Said:
        return Said(
            f"{self.what} is {self.state} at rest",
            "Everything has ended, and the cache still keeps memory from use for something that nobody"
            " does any more.",
        )
