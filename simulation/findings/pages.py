"""Findings about pages: what they hold, which transfers touch them, and who owns them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..world.contents import EMPTY, GARBAGE, SHARDS, TORN, describe
from .finding import Finding, Said

_POOLS = {"kv": "attention KV", "window": "sliding-window KV", "state": "recurrent state"}
_HELD = {
    EMPTY: "nothing",
    GARBAGE: "what a failed transfer has left in it",
    TORN: "what a transfer has written of it so far",
}


def pool_in_words(pool: str) -> str:
    """Say what the pages of a pool are for."""
    return _POOLS.get(pool, pool)


@dataclass(frozen=True, slots=True)
class Slot:
    """A page of one pool on one tier of one rank."""

    rank: int
    tier: str
    pool: str
    page: int

    @property
    def plain(self) -> str:
        """The page in plain words."""
        return f"page {self.page} of {self.tier} memory ({pool_in_words(self.pool)})"

    def __str__(self) -> str:
        return f"{self.tier} {self.pool} page {self.page}"


def _goes_on(holds: int) -> str:
    return "without what it needs" if holds == EMPTY else "from wrong data"


def _held(holds: int, rank: int) -> str:
    if holds in _HELD:
        return _HELD[holds]
    if holds // SHARDS != rank:
        return f"rank {holds // SHARDS}'s part of a prefix where rank {rank}'s belongs"
    return "the data of another prefix"


@dataclass(frozen=True, slots=True)
class WrongOffer(Finding):
    """The tree has a page that does not hold the prefix that it stands for."""

    slot: Slot
    wanted: int
    holds: int

    def say(self) -> Said:
        rank, slot = self.slot.rank, self.slot
        return Said(
            f"rank {rank}: the tree offers {slot} as {describe(self.wanted)}, and it holds "
            f"{describe(self.holds)}",
            f"On rank {rank} the cache offers {slot.plain} as part of a cached prefix, and the page"
            f" holds {_held(self.holds, rank)}: the next request with that prefix would go on"
            f" {_goes_on(self.holds)}.",
        )


@dataclass(frozen=True, slots=True)
class OfferStillWritten(Finding):
    """The tree has a page that a transfer still writes."""

    slot: Slot

    def say(self) -> Said:
        rank, slot = self.slot.rank, self.slot
        return Said(
            f"rank {rank}: the tree offers {slot}, which a transfer may still write",
            f"On rank {rank} the cache offers {slot.plain} as part of a cached prefix while a transfer"
            " still writes it.",
        )


@dataclass(frozen=True, slots=True)
class WrongPage(Finding):
    """A page of a request does not hold the prefix that the request needs there."""

    slot: Slot
    request: str
    wanted: int
    holds: int

    def say(self) -> Said:
        rank, slot = self.slot.rank, self.slot
        return Said(
            f"rank {rank}: {slot} of request {self.request} holds {describe(self.holds)} instead of "
            f"{describe(self.wanted)}",
            f"On rank {rank} request {self.request} was given {slot.plain} as its own, and the page"
            f" holds {_held(self.holds, rank)}: it would go on {_goes_on(self.holds)}.",
        )


@dataclass(frozen=True, slots=True)
class PageStillWritten(Finding):
    """A request uses a page that a transfer still writes."""

    slot: Slot
    request: str

    def say(self) -> Said:
        rank, slot = self.slot.rank, self.slot
        return Said(
            f"rank {rank}: {slot} of request {self.request} is in use and being written",
            f"On rank {rank} request {self.request} uses {slot.plain} while a transfer writes it.",
        )


@dataclass(frozen=True, slots=True)
class FreePageChanged(Finding):
    """A page was written while no request had it."""

    slot: Slot
    left: int
    holds: int

    def say(self) -> Said:
        rank, slot = self.slot.rank, self.slot
        return Said(
            f"rank {rank}: {slot} is free, and holds {describe(self.holds)} instead of "
            f"{describe(self.left)}",
            f"On rank {rank} something has written {slot.plain} although it is free, so it would"
            " overwrite whatever is put there next.",
        )


@dataclass(frozen=True, slots=True)
class TwoTransfers(Finding):
    """A transfer writes a page that another one reads or writes, or reads one that another writes."""

    slot: Slot
    operation: int
    writes: bool
    writer: int | None
    """The operation that writes the page already; None if others read it."""

    def say(self) -> Said:
        rank, writer = self.slot.rank, self.writer
        verb = "writes" if self.writes else "reads"
        other = "others still read" if writer is None else f"operation {writer} still writes"
        return Said(
            f"rank {rank}: operation {self.operation} {verb} {self.slot} while {other} it",
            f"On rank {rank} two transfers use {self.slot.plain} at the same time: one {verb} it while"
            f" another still {'reads' if writer is None else 'writes'} it, so one of them moves wrong"
            " data.",
        )


@dataclass(frozen=True, slots=True)
class StillTouched(Finding):
    """A transfer touches a page of which the cache has said that no transfer does."""

    slot: Slot
    why: str
    """Why no transfer may touch the page; the text goes on after the word "although"."""

    def say(self) -> Said:
        rank, slot = self.slot.rank, self.slot
        return Said(
            f"rank {rank}: a transfer touches {slot}, although {self.why}",
            f"On rank {rank} a transfer still uses {slot.plain} although {self.why}, so wrong data is"
            " moved or computed with.",
        )


@dataclass(frozen=True, slots=True)
class NothingToCopy(Finding):
    """A page is copied that holds no prefix's content."""

    slot: Slot
    who: str
    holds: int

    def say(self) -> Said:
        rank, slot = self.slot.rank, self.slot
        return Said(
            f"rank {rank}: {self.who} copies {slot}, which holds {describe(self.holds)}",
            f"On rank {rank} the cache copies {slot.plain} for a request, and the page holds"
            f" {_held(self.holds, rank)}: the request would go on {_goes_on(self.holds)}.",
        )


@dataclass(frozen=True, slots=True)
class WrongObject(Finding):
    """An object is written to storage under a key that stands for something else."""

    rank: int
    content: int
    meaning: int | None
    """The content that the key stands for; None if the bytes are not content of any prefix."""

    def say(self) -> Said:
        under = "a page key" if self.meaning is None else f"the key of {describe(self.meaning)}"
        return Said(
            f"rank {self.rank}: a persist stores {describe(self.content)} under {under}",
            f"Rank {self.rank} writes to storage, in the place of a cached prefix,"
            f" {_held(self.content, self.rank)}: who reads it would go on {_goes_on(self.content)}.",
        )


@dataclass(frozen=True, slots=True)
class TwoOwners(Finding):
    """A page has two owners."""

    slot: Slot
    owners: tuple[str, str]

    def say(self) -> Said:
        one, other = self.owners
        return Said(
            f"{self.slot} belongs to {one} and to {other}",
            f"On every rank {self.slot.plain} belongs to {one} and to {other} at once, so one would be"
            " overwritten with the data of the other.",
        )


@dataclass(frozen=True, slots=True)
class WrongCount(Finding):
    """A node does not have the number of pages that its tokens need."""

    node: int
    width: int
    pool: str
    pages: int

    def say(self) -> Said:
        return Said(
            f"node {self.node} of {self.width} pages has {self.pages} of {self.pool}",
            f"The cache keeps {self.pages} pages of {pool_in_words(self.pool)} for a piece of a prefix"
            f" that is {self.width} pages long, so nobody can say which of them belongs where.",
        )


@dataclass(frozen=True, slots=True)
class PagesMissing(Finding):
    """A request lacks a page that it reads or writes, or has a page twice."""

    request: str
    computed: int
    room: int
    pool: str
    table: Sequence[int]

    def say(self) -> Said:
        return Said(
            f"request {self.request} has computed {self.computed} tokens and has room for {self.room}, "
            f"and its page table of pool {self.pool!r} is {self.table}",
            f"Request {self.request} is served without pages of {pool_in_words(self.pool)} that its"
            " next token has to read.",
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

    def say(self) -> Said:
        count = self.capacity - self.free - self.in_tree - self.quarantined
        return Said(
            f"{self.free} {self.tier} {self.pool} pages are free, {self.in_tree} in the tree and "
            f"{self.quarantined} in quarantine, of {self.capacity}",
            f"Of {self.tier} memory ({pool_in_words(self.pool)}) {abs(count)} pages belong to"
            f" {'nobody, so nobody can use them again' if count > 0 else 'two owners at once'}.",
        )


@dataclass(frozen=True, slots=True)
class NotToBeHad(Finding):
    """At rest, without requests, some pages cannot be allocated."""

    wanted: int
    what: str
    """Which pages were asked for."""
    found: str

    def say(self) -> Said:
        return Said(
            f"nobody holds any of {self.wanted} {self.what}, and what can be had is {self.found}",
            "Nothing is going on any more, and not all of the memory can be used again.",
        )
