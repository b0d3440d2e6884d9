"""The page index: where each object's bytes lie, kept by an existing database.

An index maps keys (digests of object names) to places, and lends out slots: numbered pieces of a
store of fixed size. It says nothing about bytes, so what is found through it is verified all the
same. One contract suite (`tests/storage_backends/page_index/`) holds every index to these
promises:

I1  A write has two phases. `reserve` lends slots that nobody else has, each under a generation that
    was never used before, until a deadline; `commit` then gives a key its place, at once for all
    readers. What is reserved and not committed is seen by nobody.
I2  A slot whose lease is over is lent out again, under a new generation. A late `commit` under the
    old one is refused (LOST). So a dead writer costs its slots for the length of a lease.
I3  Writers of one key do not wait for each other: each writes into a slot of its own, and the first
    that commits wins. The others are told what stands (STANDS), and their slots are free.
I4  A commit may replace an entry, if that still has the generation that the writer has seen. The
    slot of the old entry is free then.
I5  When all slots are used, `reserve` takes those of the entries that were used least recently.
    `confirm`, `commit` and `use` count as use; to look up does not. Recency need not be exact, but
    where `use` says that one entry continues another, that other one does not give way before it. An
    entry that is to be kept never gives way: it stays until it is dropped, removed or replaced.
I6  Whoever has read a place asks `confirm` afterwards: an entry of another generation, or none, says
    that the slot may have been lent out in between.

Every call is on a batch, and asks the database once for each few hundred keys. Calls block, are
safe from several threads, and are bounded in time by the index's own timeout. They raise
`StorageError` if the database does not answer properly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

NOTHING: Final = 0
"""In place of a generation: of an entry that is not there."""
SLOTS_MAX: Final = 1 << 40
LENGTH_MAX: Final = 1 << 50
PLACE_CHARACTERS_MAX: Final = 1024


class Entry(NamedTuple):
    """What an index knows of one object."""

    key: bytes
    place: str
    """Which file or object of the store its bytes are in."""
    offset: int
    """Where they begin there."""
    length: int
    """How long the payload is, in bytes."""
    present: int
    """The presence bits of its optional columns, an unsigned number of 64 bits."""
    generation: int
    """The generation of the slot when it was written; no other entry ever had it."""


class Reservation(NamedTuple):
    """A slot that was lent out."""

    slot: int
    generation: int


class Commit(NamedTuple):
    """A wish that a key gets a place, which was written into a reserved slot."""

    entry: Entry
    """Its generation is that of the reservation."""
    slot: int
    replaces: int
    """The generation of the entry that is to give way, or `NOTHING` if there may be none."""
    kept: bool = False
    """Whether it stays, however long it is not used."""


class CommitOutcome(IntEnum):
    """What became of a commit."""

    DONE = 0
    """The key has this place now."""
    STANDS = 1
    """There is another entry than the one to be replaced, or none. The slot is free."""
    LOST = 2
    """The lease was over and the slot has another generation."""


class Used(NamedTuple):
    """An entry, and how long it was not used."""

    entry: Entry
    age_s: float | None
    """None for one that is kept, whose uses nobody notes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What everybody who uses an index must agree on; decided by who comes first."""

    slot_bytes: int
    file_slots: int


class PageIndex(Protocol):
    """One index in one database. See the promises above."""

    text: str
    """What it is and where, for messages."""

    def open(self) -> None:
        """Connect, and make what the index needs in the database.

        Raises `ConfigError` if that does not work.
        """
        ...

    def identity(self, proposal: str) -> str:
        """Return the index's own name: the `proposal` of whoever asked first."""
        ...

    def agree(self, settings: Settings) -> Settings:
        """Return the settings that the index was begun with; `settings`, if there were none."""
        ...

    def provide(self, slots: int) -> int:
        """Let there be at least so many slots, and return how many there are."""
        ...

    def look_up(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each key."""
        ...

    def confirm(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each key as it is now, and count that as its use."""
        ...

    def use(self, keys: Sequence[bytes], after: bytes | None, distance: int) -> None:
        """Let entries count as used, each of which continues the one before it.

        Now, or where the first one is number `distance` after the entry `after`, when that was.
        """
        ...

    def reserve(self, count: int, lease_s: float) -> list[Reservation]:
        """Lend out at most `count` slots; fewer if all others are lent out already."""
        ...

    def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        """Give keys their places, one after the other. To commit again what was done is DONE."""
        ...

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back that nothing writes into any more. Those lent out again stay."""
        ...

    def drop(self, entries: Sequence[Entry]) -> None:
        """Forget entries that turned out to be wrong, as far as their generation still stands."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget the entries of these keys, whatever they are."""
        ...

    def entries(self) -> Iterator[list[Used]]:
        """Yield all entries in any order, a few hundred at a time.

        An entry that changes meanwhile may be told as it was, as it is, twice or not at all. Ages are
        as of the beginning.
        """
        ...

    def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


def is_sane(entry: Entry) -> bool:
    """Say whether an entry that came out of a database can be one at all."""
    return (
        0 <= entry.offset <= LENGTH_MAX
        and 0 <= entry.length <= LENGTH_MAX
        and 0 <= entry.present < 1 << 64
        and entry.generation > NOTHING
        and len(entry.place) <= PLACE_CHARACTERS_MAX
    )
