"""A page index in one SQLite file: for one process, or several of one host.

The file is in WAL mode, and reads have a connection of their own, so readers never wait for a
writer; writers take turns. It must be on a local filesystem: WAL needs memory that all processes share.
What a power failure takes are the last commits, and what it leaves of their slots is found out by
checksums.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

from ...errors import ConfigError, StorageError
from .contract import (
    NOTHING,
    SLOTS_MAX,
    Commit,
    CommitOutcome,
    Entry,
    Reservation,
    Settings,
    Used,
    is_sane,
)
from .sqlite_file import make_file, use_wal, why_no_answer, why_not_opened
from .uses import Uses

_TIMEOUT_S: Final = 5.0
"""How long a call waits for another thread or process."""
_KEYS_AT_A_TIME: Final = 500
_FORMAT: Final = 1
_KEPT: Final = (1 << 63) - 1
"""In place of a time of use: of an entry that never gives way."""
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
"""`slots` has those that are free (lent until 0) or lent out; those of entries are in `entries`, and
those with a number of `fresh` or more were never used. Times are in microseconds since 1970. An index
that is not what this module wrote may hold anything; nothing of it is believed."""


class _Connection:
    """A connection to the database, for one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.database: sqlite3.Connection | None = None

    def close(self) -> None:
        database, self.database = self.database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()


class SqlitePageIndex:
    """Keeps the contract of `PageIndex`.

    Reads write nothing: what was used is noted here, and goes into the file with the next
    reservation, and every few seconds if nobody else writes. `home` is the directory of the store, in
    which missing directories are made.
    """

    def __init__(
        self, path: str, *, home: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.text = f"sqlite://{path}"
        self._path = Path(path)
        self._home = home
        self._clock = clock
        self._writing = _Connection()
        self._reading = _Connection()
        self._uses = Uses(clock)

    def open(self) -> None:
        """Open the file, made with mode 0600 if it is new."""
        try:
            make_file(self._path, self._home)
            self._writing.database = self._connect()
            self._make_tables(self._writing.database)
            self._reading.database = self._connect()
            self._reading.database.execute("PRAGMA query_only = ON")
        except (OSError, ValueError, TypeError, sqlite3.Error, StorageError) as error:
            self.close()
            why = why_not_opened(error, self._path)
            raise ConfigError(f"index {self.text} cannot be used: {why}") from error

    def identity(self, proposal: str) -> str:
        """Return the index's own name."""
        with self._change() as database:
            return str(_set_default(database, "identity", proposal))

    def agree(self, settings: Settings) -> Settings:
        """Return the settings that the index was begun with."""
        with self._change() as database:
            return Settings(
                slot_bytes=int(_set_default(database, "slot_bytes", settings.slot_bytes)),
                file_slots=int(_set_default(database, "file_slots", settings.file_slots)),
            )

    def provide(self, slots: int) -> int:
        """Let there be at least so many slots."""
        with self._change() as database:
            there = max(_number(database, "slots"), min(slots, SLOTS_MAX))
            _set(database, "slots", there)
            return there

    def look_up(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each key."""
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
        """Return the entry of each key, and note that it was used."""
        entries = self.look_up(keys)
        if self._uses.note(entry.key for entry in entries if entry is not None):
            self._note_uses_if_free()
        return entries

    def use(self, keys: Sequence[bytes], after: bytes | None, distance: int) -> None:
        """Let entries count as used, at times that fall from one to the next."""
        with self._change() as database:
            self._note_uses(database)
            query = "SELECT used FROM entries WHERE key = ? AND used < ?"
            found = [] if after is None else _ints(database, query, (after, _KEPT))
            first = found[0] - distance if found else self._uses.now()
            times = [(first - at, key, _KEPT) for at, key in enumerate(keys)]
            database.executemany("UPDATE entries SET used = ? WHERE key = ? AND used < ?", times)

    def reserve(self, count: int, lease_s: float) -> list[Reservation]:
        """Lend out slots: free ones, fresh ones, then those of what was used least recently."""
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
        """Give keys their places."""
        with self._change() as database:
            return [self._commit(database, each) for each in commits]

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back."""
        with self._change() as database:
            database.executemany(
                "UPDATE slots SET lent_until = 0 WHERE slot = ? AND generation = ?", reservations
            )

    def drop(self, entries: Sequence[Entry]) -> None:
        """Forget entries of these generations."""
        with self._change() as database:
            for entry in entries:
                _forget(database, "key = ? AND generation = ?", (entry.key, entry.generation))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget the entries of these keys."""
        with self._change() as database:
            for key in keys:
                _forget(database, "key = ?", (key,))

    def entries(self) -> Iterator[list[Used]]:
        """Yield all entries in the order of their keys."""
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
            told = [(_entry(row[:-1]), row[-1]) for row in rows]
            yield [Used(each, _age_s(used, now)) for each, used in told if each]

    def close(self) -> None:
        """Note what was used, and close the file."""
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
            # Generations never seen before, also if the file was lost and begun again.
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
        """Note what was used, unless another thread or process writes: a read waits for this."""
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
        """Lend a connection."""
        if not connection.lock.acquire(timeout=_TIMEOUT_S):
            raise StorageError(f"index {self.text} was busy for {_TIMEOUT_S:g} s")
        try:
            if connection.database is None:
                raise StorageError(f"index {self.text} is not open")
            yield connection.database
        except sqlite3.Error as error:
            why = why_no_answer(error, self._path)
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
    """Return a setting of the index, which is `value` now if there was none."""
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
    """Forget the entries that were used least recently, and return their slots."""
    if count <= 0:
        return []
    query = "SELECT key, slot FROM entries WHERE used < ? ORDER BY used LIMIT ?"
    rows = database.execute(query, (_KEPT, count)).fetchall()
    database.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key, _ in rows])
    return [int(slot) for _, slot in rows]


def _forget(database: sqlite3.Connection, which: str, values: Sequence[Any]) -> None:
    """Delete an entry; its slot is free."""
    query = f"DELETE FROM entries WHERE {which} RETURNING slot, generation"  # noqa: S608 - ours.
    for slot, generation in database.execute(query, values).fetchall():
        database.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, 0)", (slot, generation))


def _age_s(used: object, now: int) -> float | None:
    if not isinstance(used, int) or used == _KEPT:
        return None
    return max(0.0, (now - used) / 1e6)


def _entry(row: tuple[Any, ...]) -> Entry | None:
    """Return a row as an entry, or None if it is not what this module wrote."""
    key, place, offset, length, present, generation = row
    numbers = (offset, length, present, generation)
    if not isinstance(key, bytes) or not isinstance(place, str):
        return None
    if not all(isinstance(each, int) for each in numbers):
        return None
    entry = Entry(key, place, offset, length, present & ((1 << 64) - 1), generation)
    return entry if is_sane(entry) else None
