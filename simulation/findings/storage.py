"""Findings about stores that are attached and detached."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...coordinator.proposal import Change, Proposal
from .finding import Finding, Said

_STATES = {"draining": "being detached", "attaching": "being attached"}
_VERBS = {Change.ATTACH: "attach", Change.DETACH: "detach"}


@dataclass(frozen=True, slots=True)
class ClosedStore(Finding):
    """Something uses a store after it was closed."""

    rank: int
    who: str
    """What uses the store, with its article."""
    uri: str

    def say(self) -> Said:
        return Said(
            f"rank {self.rank}: {self.who} touches store {self.uri}, which was closed",
            f"On rank {self.rank} {self.who} uses the storage {self.uri} after it was detached and"
            " closed there, so it may fail or reach something else.",
        )


@dataclass(frozen=True, slots=True)
class NotOpen(Finding):
    """A rank begins to use a store that it has not opened, or beside another one."""

    rank: int

    def say(self) -> Said:
        return Said(
            f"rank {self.rank}: a store is attached that is not open, or beside another",
            f"Rank {self.rank} begins to use storage that it has not opened yet, or while it still uses"
            " another one, so the ranks no longer read and write in the same place.",
        )


@dataclass(frozen=True, slots=True)
class OtherStores(Finding):
    """The ranks do not all use the same store."""

    states: Sequence[str]
    used: Sequence[str | None]

    def say(self) -> Said:
        return Said(
            f"the ranks have different stores: {list(self.states)}, {list(self.used)}",
            "The ranks no longer use the same storage, so one finds there what another does not, and"
            " they would go on with different work.",
        )


@dataclass(frozen=True, slots=True)
class AgreedOtherwise(Finding):
    """The ranks use another store than the replicas say."""

    state: str
    used: str | None

    def say(self) -> Said:
        has = "none of them has any in use" if self.used is None else f"they use {self.used}"
        return Said(
            f"the store is {self.state} on every rank, and {has}",
            f"The ranks agree that storage is {_STATES.get(self.state, self.state)}, and {has}.",
        )


@dataclass(frozen=True, slots=True)
class Unanswered(Finding):
    """A proposal that a rank was told is neither done nor withdrawn in time."""

    rank: int
    proposal: Proposal

    def say(self) -> Said:
        return Said(
            f"rank {self.rank} was told: {self.proposal}, and it does not end",
            f"Rank {self.rank} was told to {_VERBS[self.proposal.change]} storage, and neither does it"
            " nor says that it cannot although the time for it is up, so whoever asked waits for ever.",
        )


@dataclass(frozen=True, slots=True)
class StoreKept(Finding):
    """A store that is being detached is never let go of."""

    def say(self) -> Said:
        return Said(
            "nothing is in flight, and the store is not let go of",
            "Storage was to be detached and nothing uses it any more, but the ranks do not let go of"
            " it, so no other can ever be attached.",
        )


@dataclass(frozen=True, slots=True)
class LeftWaiting(Finding):
    """A rank has left its group without an answer to a proposal."""

    rank: int

    def say(self) -> Said:
        return Said(
            f"rank {self.rank} has left its group, and a proposal waits for it",
            f"Rank {self.rank} has left its group, and whoever told it to attach or detach storage"
            " still waits for an answer that cannot come any more.",
        )


@dataclass(frozen=True, slots=True)
class DoneOnSome(Finding):
    """A proposal was done on some ranks and not on all of them."""

    proposal: Proposal
    count: int

    def say(self) -> Said:
        return Said(
            f"{self.proposal} was done on {self.count} of the ranks that were told",
            f"Storage was {_VERBS[self.proposal.change]}ed for only {self.count} of the ranks that were"
            " told to do so, where it must be all of them or none.",
        )


@dataclass(frozen=True, slots=True)
class DoneUntold(Finding):
    """A proposal was done although some rank had not been told of it."""

    proposal: Proposal

    def say(self) -> Said:
        return Said(
            f"{self.proposal} was done, and not every rank was told of it",
            f"Storage was {_VERBS[self.proposal.change]}ed although not every rank had been told to do"
            " so.",
        )


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

    def say(self) -> Said:
        part = f"rank {self.rank}: node {self.node} is in memory at rest, and its {self.pool} pages"
        if self.lost:
            return Said(
                f"{part} up to {self.end} were used, and not written again to a store that lost them",
                "A store has lost a prompt, as by a quota, and the prompt was used after that, but"
                f" rank {self.rank} has not written it again, so after a restart it is not found.",
            )
        return Said(
            f"{part} up to {self.end} were never accepted by the store",
            f"A prompt is still in memory and the storage works, but rank {self.rank} has never written"
            " it whole, so after a restart it is not found and has to be computed anew.",
        )
