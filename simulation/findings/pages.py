"""Findings about pages: what they hold, which transfers touch them, and who owns them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..world.contents import describe
from .finding import Finding


@dataclass(frozen=True, slots=True)
class Slot:
    """A page of one pool on one tier of one rank."""

    rank: int
    tier: str
    pool: str
    page: int

    def __str__(self) -> str:
        return f"{self.tier} {self.pool} page {self.page}"


@dataclass(frozen=True, slots=True)
class WrongOffer(Finding):
    """The tree has a page that does not hold the prefix that it stands for."""

    slot: Slot
    wanted: int
    holds: int

    def __str__(self) -> str:
        rank, slot = self.slot.rank, self.slot
        return (
            f"rank {rank}: the tree offers {slot} as {describe(self.wanted)}, and it holds "
            f"{describe(self.holds)}"
        )


@dataclass(frozen=True, slots=True)
class OfferStillWritten(Finding):
    """The tree has a page that a transfer still writes."""

    slot: Slot

    def __str__(self) -> str:
        rank, slot = self.slot.rank, self.slot
        return f"rank {rank}: the tree offers {slot}, which a transfer may still write"


@dataclass(frozen=True, slots=True)
class WrongPage(Finding):
    """A page of a request does not hold the prefix that the request needs there."""

    slot: Slot
    request: str
    wanted: int
    holds: int

    def __str__(self) -> str:
        rank, slot = self.slot.rank, self.slot
        return (
            f"rank {rank}: {slot} of request {self.request} holds {describe(self.holds)} instead of "
            f"{describe(self.wanted)}"
        )


@dataclass(frozen=True, slots=True)
class PageStillWritten(Finding):
    """A request uses a page that a transfer still writes."""

    slot: Slot
    request: str

    def __str__(self) -> str:
        rank, slot = self.slot.rank, self.slot
        return f"rank {rank}: {slot} of request {self.request} is in use and being written"


@dataclass(frozen=True, slots=True)
class FreePageChanged(Finding):
    """A page was written while no request had it."""

    slot: Slot
    left: int
    holds: int

    def __str__(self) -> str:
        rank, slot = self.slot.rank, self.slot
        return (
            f"rank {rank}: {slot} is free, and holds {describe(self.holds)} instead of "
            f"{describe(self.left)}"
        )


@dataclass(frozen=True, slots=True)
class TwoTransfers(Finding):
    """A transfer writes a page that another one reads or writes, or reads one that another writes."""

    slot: Slot
    operation: int
    writes: bool
    writer: int | None
    """The operation that writes the page already; None if others read it."""

    def __str__(self) -> str:
        rank, writer = self.slot.rank, self.writer
        verb = "writes" if self.writes else "reads"
        other = "others still read" if writer is None else f"operation {writer} still writes"
        return f"rank {rank}: operation {self.operation} {verb} {self.slot} while {other} it"


@dataclass(frozen=True, slots=True)
class StillTouched(Finding):
    """A transfer touches a page of which the cache has said that no transfer does."""

    slot: Slot
    why: str
    """Why no transfer may touch the page; the text goes on after the word "although"."""

    def __str__(self) -> str:
        rank, slot = self.slot.rank, self.slot
        return f"rank {rank}: a transfer touches {slot}, although {self.why}"


@dataclass(frozen=True, slots=True)
class NothingToCopy(Finding):
    """A page is copied that holds no prefix's content."""

    slot: Slot
    who: str
    holds: int

    def __str__(self) -> str:
        rank, slot = self.slot.rank, self.slot
        return f"rank {rank}: {self.who} copies {slot}, which holds {describe(self.holds)}"


@dataclass(frozen=True, slots=True)
class WrongObject(Finding):
    """An object is written to storage under a key that stands for something else."""

    rank: int
    content: int
    meaning: int | None
    """The content that the key stands for; None if the bytes are not content of any prefix."""

    def __str__(self) -> str:
        under = "a page key" if self.meaning is None else f"the key of {describe(self.meaning)}"
        return f"rank {self.rank}: a persist stores {describe(self.content)} under {under}"


@dataclass(frozen=True, slots=True)
class TwoOwners(Finding):
    """A page has two owners."""

    slot: Slot
    owners: tuple[str, str]

    def __str__(self) -> str:
        one, other = self.owners
        return f"{self.slot} belongs to {one} and to {other}"


@dataclass(frozen=True, slots=True)
class WrongCount(Finding):
    """A node does not have the number of pages that its tokens need."""

    node: int
    width: int
    pool: str
    pages: int

    def __str__(self) -> str:
        return f"node {self.node} of {self.width} pages has {self.pages} of {self.pool}"


@dataclass(frozen=True, slots=True)
class PagesMissing(Finding):
    """A request lacks a page that it reads or writes, or has a page twice."""

    request: str
    computed: int
    room: int
    pool: str
    table: Sequence[int]

    def __str__(self) -> str:
        return (
            f"request {self.request} has computed {self.computed} tokens and has room for {self.room}, "
            f"and its page table of pool {self.pool!r} is {self.table}"
        )


@dataclass(frozen=True, slots=True)
class Leaked(Finding):
    """At rest some page is neither free, nor in the tree, nor in quarantine."""

    tier: str
    pool: str
    free: int
    in_tree: int
    quarantined: int
    capacity: int

    def __str__(self) -> str:
        return (
            f"{self.free} {self.tier} {self.pool} pages are free, {self.in_tree} in the tree and "
            f"{self.quarantined} in quarantine, of {self.capacity}"
        )


@dataclass(frozen=True, slots=True)
class NotToBeHad(Finding):
    """At rest, without requests, some pages cannot be allocated."""

    wanted: int
    what: str
    """Which pages were asked for."""
    found: str

    def __str__(self) -> str:
        return f"nobody holds any of {self.wanted} {self.what}, and what can be had is {self.found}"
