"""The page index of `3fs://`, in one SQLite file: maps each object to a slot in a large file.

An index maps keys (digests of object names) to places (a file and an offset in it). It also reserves
slots, which are numbered places of fixed size. The index does not protect the bytes, so every object
found through it must be verified.

I1  A write has two phases. `reserve` gives exclusive slots with a deadline, each under a generation
    that was never used before. `commit` then gives a key its place, atomically for all readers. A slot
    that is reserved but not committed is invisible.
I2  A slot whose lease (reservation) has expired may be reserved again, under a new generation. A late
    `commit` under the old generation is refused (LOST). So the slots of a dead writer are unusable only
    for the length of a lease.
I3  Writers of one key do not wait for each other. Each writes to its own slot, and the first commit
    wins. The other writers get STANDS, and their slots become free.
I4  A commit may replace an entry that still has the generation that the writer saw. The slot of the
    replaced entry becomes free.
I5  When all slots are used, `reserve` evicts the least recently used entries. `confirm`, `commit` and
    `use` count as use; `look_up` does not. Times of use are approximate, but if `use` stated that one
    entry is the successor of another, the predecessor is not evicted first. A kept entry is never
    evicted: it stays until it is dropped, removed or replaced.
I6  A reader calls `confirm` after it has read from a place. If the entry is gone or has another
    generation, the slot may have been reserved again during the read, and the bytes must not be used.

The file is in WAL mode, and reads have a separate connection, so readers never wait for a writer. Only
one writer at a time changes the file. Several processes of one host may use it. The file must be on a
local filesystem, because WAL needs memory shared by all processes. A power failure loses the last
commits; readers detect by checksums if it damaged the slots.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec
from msgspec import Meta

from ...errors import ConfigError, StorageError
from .index_file import make_file, open_error, query_error, use_wal

NOTHING: Final = 0
"""A value that stands for the generation of a missing entry."""
SLOTS_MAX: Final = 1 << 40
LENGTH_MAX: Final = 1 << 50
PLACE_CHARACTERS_MAX: Final = 1024
USES_KEPT_MAX: Final = 4096
USES_KEPT_S: Final = 5.0
_TIMEOUT_S: Final = 5.0
"""Seconds that a call waits for a lock that another thread or process holds."""
_KEYS_AT_A_TIME: Final = 500
_FORMAT: Final = 1
_KEPT: Final = (1 << 63) - 1
"""The value stored instead of a time of use in a kept entry, that is, one that is never evicted."""
_COLUMNS: Final = "key, place, offset, length, present, generation"
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    key BLOB PRIMARY KEY, place TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    present INTEGER NOT NULL, generation INTEGER NOT NULL, slot INTEGER NOT NULL,
    used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (used);
CREATE TABLE IF NOT EXISTS slots (
    slot INTEGER PRIMARY KEY, generation INTEGER NOT NULL, lent_until INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS slots_by_lease ON slots (lent_until);
"""
"""The tables of the index. `slots` contains the free slots (with `lent_until` 0) and the reserved ones.
The slots of entries are in `entries`. Slots with numbers from `fresh` on were never used. Times are in
microseconds since 1970. A file that this module did not write may contain anything, so every value is
checked when read."""


class Entry(NamedTuple):
    """The index's record of one object."""

    key: bytes
    place: Annotated[str, Meta(max_length=PLACE_CHARACTERS_MAX)]
    """The name of the file that contains the object's bytes."""
    offset: Annotated[int, Meta(ge=0, le=LENGTH_MAX)]
    """Offset of the object in the file, in bytes."""
    length: Annotated[int, Meta(ge=0, le=LENGTH_MAX)]
    """Length of the object's payload in bytes."""
    present: int
    """The presence bits of the object's optional columns, an unsigned number of 64 bits."""
    generation: Annotated[int, Meta(gt=NOTHING)]
    """The generation under which the slot was reserved; no other entry has ever had it."""


class Reservation(NamedTuple):
    """A reserved slot: its number, and the generation of the reservation."""

    slot: int
    generation: int


class Commit(NamedTuple):
    """A request to map a key to a reserved slot, after the object was written to the slot."""

    entry: Entry
    """The new entry, under the generation of the reserved slot."""
    slot: int
    replaces: int
    """The generation of the entry to replace, or `NOTHING` if the key must not have an entry."""
    kept: bool = False
    """Whether the entry is never evicted."""


class CommitOutcome(IntEnum):
    """The outcome of a commit."""

    DONE = 0
    """The commit succeeded: the key is now mapped to the slot."""
    STANDS = 1
    """The key has another entry than the one to replace, so the commit was refused and its slot freed.
    """
    LOST = 2
    """The slot's lease had expired and the slot was reserved again, so the commit was refused."""


class Used(NamedTuple):
    """An entry and the seconds since its last use."""

    entry: Entry
    age_s: float | None
    """Seconds since the last use; None for a kept entry, whose uses are not recorded."""


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """The slot sizes that all users of an index must share; the first user sets them."""

    slot_bytes: int
    file_slots: int


class _Uses:
    """Times of last use that are not written to the index yet, by key. Thread-safe.

    A time is in microseconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[bytes, int] = {}
        self._since_s = 0.0
        self._last = 0

    def __bool__(self) -> bool:
        return bool(self._times)

    def now(self) -> int:
        """Return the current time in microseconds, but always more than the last returned time."""
        with self._lock:
            return self._next()

    def note(self, keys: Iterable[bytes]) -> bool:
        """Record that `keys` are used now; return whether the record is due to be written."""
        with self._lock:
            if not self._times:
                self._since_s = time.monotonic()
            elif len(self._times) >= 2 * USES_KEPT_MAX:
                # Drop the recorded uses. There are so many only if writing them to the index keeps
                # failing. Their loss only makes the order of eviction less exact.
                self._times.clear()
            for key in keys:
                self._times[key] = self._next()
            old = bool(self._times) and time.monotonic() >= self._since_s + USES_KEPT_S
            return old or len(self._times) >= USES_KEPT_MAX

    def pop_all(self) -> list[tuple[int, bytes]]:
        """Return the (time, key) pairs recorded so far, and clear the record."""
        with self._lock:
            times, self._times = self._times, {}
        return [(used, key) for key, used in times.items()]

    def forget(self, key: bytes) -> None:
        """Discard the recorded use of a key, because the index has a newer time for its entry."""
        with self._lock:
            self._times.pop(key, None)

    def _next(self) -> int:
        self._last = max(self._last + 1, int(self._clock() * 1e6))
        return self._last


class _Connection:
    """A connection to the SQLite database, used by one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.database: sqlite3.Connection | None = None

    def close(self) -> None:
        database, self.database = self.database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()


class PageIndex:
    """The index of one store, in one SQLite file. Thread-safe.

    Every call is a batch, blocks, and is limited by the timeout of the database. Calls raise
    `StorageError` if the database does not answer properly.

    Reads record uses in memory only. The recorded uses are written with the next reservation, and every
    few seconds if no other writer is active. `home` is the directory of the store; missing directories
    are created only within it.
    """

    def __init__(
        self, path: Path, *, home: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.text = f"sqlite://{path}"
        self._path = path
        self._home = home
        self._clock = clock
        self._writing = _Connection()
        self._reading = _Connection()
        self._uses = _Uses(clock)

    def open(self) -> None:
        """Open the SQLite file; create it with mode 0600 if it does not exist."""
        try:
            make_file(self._path, self._home)
            self._writing.database = self._connect()
            self._make_tables(self._writing.database)
            self._reading.database = self._connect()
            self._reading.database.execute("PRAGMA query_only = ON")
        except (OSError, ValueError, TypeError, sqlite3.Error, StorageError) as error:
            self.close()
            why = open_error(error, self._path)
            raise ConfigError(f"index {self.text} cannot be used: {why}") from error

    def identity(self, proposal: str) -> str:
        """Return the index's identity. An index without one adopts `proposal` as its identity."""
        with self._change() as database:
            return str(_set_default(database, "identity", proposal))

    def agree(self, settings: SlotSizes) -> SlotSizes:
        """Return the slot sizes recorded in the index; a new index records `settings`."""
        with self._change() as database:
            return SlotSizes(
                slot_bytes=int(_set_default(database, "slot_bytes", settings.slot_bytes)),
                file_slots=int(_set_default(database, "file_slots", settings.file_slots)),
            )

    def provide(self, slots: int) -> int:
        """Raise the number of slots in the index to at least `slots`; return the resulting number."""
        with self._change() as database:
            there = max(_number(database, "slots"), min(slots, SLOTS_MAX))
            _set(database, "slots", there)
            return there

    def look_up(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return for each key its entry or None, without recording a use."""
        found: dict[bytes, Entry] = {}
        with self._use(self._reading) as database:
            for start in range(0, len(keys), _KEYS_AT_A_TIME):
                some = list(keys[start : start + _KEYS_AT_A_TIME])
                marks = ", ".join("?" * len(some))
                rows = database.execute(
                    f"SELECT {_COLUMNS} FROM entries WHERE key IN ({marks})",  # noqa: S608 - marks.
                    some,
                )
                for row in rows:
                    entry = _entry(row)
                    if entry is not None:
                        found[entry.key] = entry
        return [found.get(key) for key in keys]

    def confirm(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return for each key its entry or None, and record the use of each entry."""
        entries = self.look_up(keys)
        if self._uses.note(entry.key for entry in entries if entry is not None):
            self._note_uses_if_free()
        return entries

    def use(self, keys: Sequence[bytes], after: bytes | None, distance: int) -> None:
        """Mark entries as used; each of `keys` is the successor of the key before it.

        If `after` has an entry, the first of `keys` is `distance` steps after it, and gets a time of
        use that is a little earlier than that of `after`. Otherwise the first of `keys` gets the time
        now. Each later entry gets a time a little earlier than that of its predecessor.
        """
        with self._change() as database:
            self._note_uses(database)
            query = "SELECT used FROM entries WHERE key = ? AND used < ?"
            found = [] if after is None else _ints(database, query, (after, _KEPT))
            first = found[0] - distance if found else self._uses.now()
            times = [(first - at, key, _KEPT) for at, key in enumerate(keys)]
            database.executemany("UPDATE entries SET used = ? WHERE key = ? AND used < ?", times)

    def reserve(self, count: int, lease_s: float) -> list[Reservation]:
        """Reserve slots: free ones, then never used ones, then those of least recently used entries."""
        with self._change() as database:
            self._note_uses(database)
            now = self._uses.now()
            slots = _ints(
                database,
                "SELECT slot FROM slots WHERE lent_until <= ? ORDER BY lent_until LIMIT ?",
                (now, count),
            )
            fresh = _number(database, "fresh")
            end = min(fresh + count - len(slots), _number(database, "slots"))
            if end > fresh:
                slots += range(fresh, end)
                _set(database, "fresh", end)
            slots += _evict(database, count - len(slots))
            first = max(_number(database, "generation"), NOTHING) + 1
            _set(database, "generation", first + len(slots))
            lent = [Reservation(slot, first + at) for at, slot in enumerate(slots)]
            until = now + int(lease_s * 1e6)
            database.executemany(
                "INSERT OR REPLACE INTO slots VALUES (?, ?, ?)", [(*each, until) for each in lent]
            )
            return lent

    def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        """Apply the commits in order; return their outcomes. A repeated commit is DONE again."""
        with self._change() as database:
            return [self._commit(database, each) for each in commits]

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Free reserved slots that will not be committed.

        A slot stays unchanged if it was reserved again under another generation.
        """
        with self._change() as database:
            database.executemany(
                "UPDATE slots SET lent_until = 0 WHERE slot = ? AND generation = ?", reservations
            )

    def drop(self, entries: Sequence[Entry]) -> None:
        """Delete entries whose objects are corrupt, unless the entry was replaced meanwhile."""
        with self._change() as database:
            for entry in entries:
                _forget(database, "key = ? AND generation = ?", (entry.key, entry.generation))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete the entries of these keys, whatever their generation."""
        with self._change() as database:
            for key in keys:
                _forget(database, "key = ?", (key,))

    def entries(self) -> Iterator[list[Used]]:
        """Yield all entries in batches of a few hundred, sorted by key.

        An entry that changes during the listing may appear in its old or new state, twice or not at
        all. Ages are relative to the start of the listing.
        """
        after, now = b"", int(self._clock() * 1e6)
        while True:
            with self._use(self._reading) as database:
                rows = database.execute(
                    f"SELECT {_COLUMNS}, used FROM entries WHERE key > ? ORDER BY key LIMIT ?",  # noqa: S608
                    (after, _KEYS_AT_A_TIME),
                ).fetchall()
            if not rows:
                return
            after = rows[-1][0]
            decoded = [(_entry(row[:-1]), row[-1]) for row in rows]
            yield [Used(each, _age_s(used, now)) for each, used in decoded if each]

    def close(self) -> None:
        """Write the recorded uses to the file, and close it."""
        with self._reading.lock:
            self._reading.close()
        with self._writing.lock:
            database = self._writing.database
            if database is not None and self._uses:
                with suppress(sqlite3.Error), _transaction(database):
                    self._note_uses(database)
            self._writing.close()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )

    def _make_tables(self, database: sqlite3.Connection) -> None:
        mode = use_wal(database, _TIMEOUT_S)
        if mode != "wal":
            raise StorageError(f"its journal mode is {mode!r} and cannot be WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        with _transaction(database):
            for statement in _TABLES.split(";"):
                database.execute(statement)
            version = int(_set_default(database, "format", _FORMAT))
            # Start generations at the current time, so that they stay unique even if the file is lost
            # and created again.
            _set_default(database, "generation", self._uses.now())
        if version != _FORMAT:
            raise StorageError(f"it has format {version}, and this version reads {_FORMAT}")

    def _commit(self, database: sqlite3.Connection, wish: Commit) -> CommitOutcome:
        entry = wish.entry
        standing = _ints(database, "SELECT generation FROM entries WHERE key = ?", (entry.key,))
        if standing == [entry.generation]:
            return CommitOutcome.DONE
        lent = (wish.slot, entry.generation)
        ours = "SELECT slot FROM slots WHERE slot = ? AND generation = ? AND lent_until > 0"
        if not _ints(database, ours, lent):
            return CommitOutcome.LOST
        if (standing or [NOTHING]) != [wish.replaces]:
            database.execute("UPDATE slots SET lent_until = 0 WHERE slot = ?", (wish.slot,))
            return CommitOutcome.STANDS
        _forget(database, "key = ?", (entry.key,))
        database.execute("DELETE FROM slots WHERE slot = ?", (wish.slot,))
        present = entry.present - (1 << 64) if entry.present >> 63 else entry.present
        row = (entry.key, entry.place, entry.offset, entry.length, present, entry.generation)
        database.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, wish.slot, _KEPT if wish.kept else self._uses.now()),
        )
        self._uses.forget(entry.key)
        return CommitOutcome.DONE

    def _note_uses(self, database: sqlite3.Connection) -> None:
        uses = self._uses.pop_all()
        database.executemany("UPDATE entries SET used = MAX(used, ?1) WHERE key = ?2", uses)

    def _note_uses_if_free(self) -> None:
        """Write the recorded uses to the file unless another writer is active.

        Does not wait for another writer, because this is called by reads, which would be delayed.
        """
        if not self._writing.lock.acquire(blocking=False):
            return
        try:
            database = self._writing.database
            if database is not None:
                with suppress(sqlite3.Error):
                    database.execute("PRAGMA busy_timeout = 0")
                    with _transaction(database):
                        self._note_uses(database)
                with suppress(sqlite3.Error):
                    database.execute(f"PRAGMA busy_timeout = {int(_TIMEOUT_S * 1000)}")
        finally:
            self._writing.lock.release()

    @contextmanager
    def _use(self, connection: _Connection) -> Generator[sqlite3.Connection]:
        """Hold the connection's lock during the block; turn errors of the block into `StorageError`."""
        if not connection.lock.acquire(timeout=_TIMEOUT_S):
            raise StorageError(f"index {self.text} was busy for {_TIMEOUT_S:g} s")
        try:
            if connection.database is None:
                raise StorageError(f"index {self.text} is not open")
            yield connection.database
        except sqlite3.Error as error:
            why = query_error(error, self._path)
            raise StorageError(f"index {self.text} does not answer: {why}") from error
        except (ValueError, TypeError, OverflowError) as error:
            raise StorageError(f"index {self.text} is damaged: {error}") from error
        finally:
            connection.lock.release()

    @contextmanager
    def _change(self) -> Generator[sqlite3.Connection]:
        with self._use(self._writing) as database, _transaction(database):
            yield database


@contextmanager
def _transaction(database: sqlite3.Connection) -> Generator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def _set_default(database: sqlite3.Connection, name: str, value: str | int) -> str | int:
    """Return a setting of the index; set it to `value` if it is missing."""
    database.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (name, value))
    (there,) = database.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
    return cast("str | int", there)


def _number(database: sqlite3.Connection, name: str) -> int:
    return int(_set_default(database, name, 0))


def _set(database: sqlite3.Connection, name: str, value: int) -> None:
    database.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))


def _ints(database: sqlite3.Connection, query: str, values: Sequence[Any]) -> list[int]:
    return [int(value) for (value,) in database.execute(query, values)]


def _evict(database: sqlite3.Connection, count: int) -> list[int]:
    """Delete the least recently used entries and return the slots that they occupied."""
    if count <= 0:
        return []
    query = "SELECT key, slot FROM entries WHERE used < ? ORDER BY used LIMIT ?"
    rows = database.execute(query, (_KEPT, count)).fetchall()
    database.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key, _ in rows])
    return [int(slot) for _, slot in rows]


def _forget(database: sqlite3.Connection, which: str, values: Sequence[Any]) -> None:
    """Delete the entries that the SQL condition `which` selects, and free their slots."""
    query = f"DELETE FROM entries WHERE {which} RETURNING slot, generation"  # noqa: S608 - ours.
    for slot, generation in database.execute(query, values).fetchall():
        database.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, 0)", (slot, generation))


def _age_s(used: object, now: int) -> float | None:
    if not isinstance(used, int) or used == _KEPT:
        return None
    return max(0.0, (now - used) / 1e6)


def _entry(row: tuple[Any, ...]) -> Entry | None:
    """Return a row of the table as an entry, or None if this module cannot have written it."""
    try:
        entry = msgspec.convert(row, Entry)
    except msgspec.ValidationError:
        return None
    return entry._replace(present=entry.present & ((1 << 64) - 1))
