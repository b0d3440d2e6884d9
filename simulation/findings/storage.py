"""Findings about stores that are attached and detached."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...coordinator.proposal import Proposal
from .finding import Finding


@dataclass(frozen=True, slots=True)
class ClosedStore(Finding):
    """Something uses a store after it was closed."""

    rank: int
    who: str
    """What uses the store, with its article."""
    uri: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.who} touches store {self.uri}, which was closed"


@dataclass(frozen=True, slots=True)
class NotOpen(Finding):
    """A rank begins to use a store that it has not opened, or beside another one."""

    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}: a store is attached that is not open, or beside another"


@dataclass(frozen=True, slots=True)
class OtherStores(Finding):
    """The ranks do not all use the same store."""

    states: Sequence[str]
    used: Sequence[str | None]

    def __str__(self) -> str:
        return f"the ranks have different stores: {list(self.states)}, {list(self.used)}"


@dataclass(frozen=True, slots=True)
class AgreedOtherwise(Finding):
    """The ranks use another store than the replicas say."""

    state: str
    used: str | None

    def __str__(self) -> str:
        has = "none of them has any in use" if self.used is None else f"they use {self.used}"
        return f"the store is {self.state} on every rank, and {has}"


@dataclass(frozen=True, slots=True)
class Unanswered(Finding):
    """A proposal that a rank was told is neither done nor withdrawn in time."""

    rank: int
    proposal: Proposal

    def __str__(self) -> str:
        return f"rank {self.rank} was told: {self.proposal}, and it does not end"


@dataclass(frozen=True, slots=True)
class StoreKept(Finding):
    """A store that is being detached is never let go of."""

    def __str__(self) -> str:
        return "nothing is in flight, and the store is not let go of"


@dataclass(frozen=True, slots=True)
class LeftWaiting(Finding):
    """A rank has left its group without an answer to a proposal."""

    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} has left its group, and a proposal waits for it"


@dataclass(frozen=True, slots=True)
class DoneOnSome(Finding):
    """A proposal was done on some ranks and not on all of them."""

    proposal: Proposal
    count: int

    def __str__(self) -> str:
        return f"{self.proposal} was done on {self.count} of the ranks that were told"


@dataclass(frozen=True, slots=True)
class DoneUntold(Finding):
    """A proposal was done although some rank had not been told of it."""

    proposal: Proposal

    def __str__(self) -> str:
        return f"{self.proposal} was done, and not every rank was told of it"


@dataclass(frozen=True, slots=True)
class NotWritten(Finding):
    """Something is in memory that the store should have been given by now, and it was not."""

    rank: int
    node: int
    pool: str
    end: int
    """The position, in pages, at which the part ends that is not written."""
    lost: bool = False
    """Whether the store had it once, and had lost it a minute before it was used again."""

    def __str__(self) -> str:
        part = f"rank {self.rank}: node {self.node} is in memory at rest, and its {self.pool} pages"
        if self.lost:
            return f"{part} up to {self.end} were used, and not written again to a store that lost them"
        return f"{part} up to {self.end} were never accepted by the store"
