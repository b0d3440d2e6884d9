"""A directory of groups without a server: in one process, or in one SQLite file for all of a host.

Every call is one transaction, so it happens at once for everybody. Time is the host's wall clock, which
all its processes share.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ....errors import ConfigError, StorageError
from .directory import (
    Lease,
    Listing,
    Member,
    Registration,
    from_record,
    require_lease,
    to_record,
)

IN_PROCESS = ":memory:"
"""In place of a path: a directory of this object's own."""

_TIMEOUT_S = 5.0
"""How long a call waits for another process."""
_TABLES = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    name TEXT PRIMARY KEY, life INTEGER NOT NULL, until_us INTEGER NOT NULL, record BLOB NOT NULL
) WITHOUT ROWID;
"""


class EmbeddedDirectory:
    """Keeps the contract of `GroupDirectory`."""

    def __init__(self, path: str = IN_PROCESS, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file, which is made if its directory is there."""
        try:
            # Transactions are begun by hand, and the lock lets one thread in at a time.
            self._database = sqlite3.connect(
                self._path, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.executescript(_TABLES)
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"the directory {self._path} cannot be opened: {error}") from error

    def register(self, registration: Registration, lease_s: float) -> Lease:
        """List a group, in the place of one of its name."""
        require_lease(lease_s)
        with self._transaction() as (database, now_us):
            life = _raised(database, "life", now_us)
            until_us = now_us + int(lease_s * 1e6)
            row = (registration.name, life, until_us, to_record(registration))
            database.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", row)
            _raised(database, "version", now_us)
            return Lease(registration.name, life)

    def renew(self, lease: Lease, lease_s: float) -> bool:
        """Let a lease last longer, if it is not over."""
        require_lease(lease_s)
        with self._transaction() as (database, now_us):
            row = (now_us + int(lease_s * 1e6), lease.name, lease.life)
            renewed = "UPDATE members SET until_us = ? WHERE name = ? AND life = ?"
            return database.execute(renewed, row).rowcount > 0

    def leave(self, lease: Lease) -> None:
        """Take a group off the list."""
        with self._transaction() as (database, now_us):
            gone = "DELETE FROM members WHERE name = ? AND life = ?"
            if database.execute(gone, (lease.name, lease.life)).rowcount:
                _raised(database, "version", now_us)

    def groups(self) -> Listing:
        """Return who is there."""
        with self._transaction() as (database, _):
            found = database.execute("SELECT value FROM counters WHERE name = 'version'").fetchone()
            rows = database.execute("SELECT record, life FROM members ORDER BY name").fetchall()
        known = ((from_record(bytes(record)), int(life)) for record, life in rows)
        members = tuple(Member(each, life) for each, life in known if each is not None)
        return Listing(0 if found is None else int(found[0]), members)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            database, self._database = self._database, None
            if database is not None:
                database.close()

    @contextmanager
    def _transaction(self) -> Generator[tuple[sqlite3.Connection, int]]:
        """Lend the database, without those whose leases are over, and the time in microseconds."""
        with self._lock:
            database = self._database
            if database is None:
                raise StorageError(f"the directory {self._path} is not open")
            try:
                database.execute("BEGIN IMMEDIATE")
                now_us = int(self._clock() * 1e6)
                over = "DELETE FROM members WHERE until_us <= ?"
                if database.execute(over, (now_us,)).rowcount:
                    _raised(database, "version", now_us)
                yield database, now_us
                database.execute("COMMIT")
            except sqlite3.Error as error:
                raise StorageError(
                    f"the directory {self._path} does not answer: {error}"
                ) from error
            finally:
                if database.in_transaction:
                    database.execute("ROLLBACK")


def _raised(database: sqlite3.Connection, name: str, now_us: int) -> int:
    """Return a counter's next value, which is also later than any of a file that was lost."""
    (value,) = database.execute(
        "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name)"
        " DO UPDATE SET value = max(value + 1, ?2) RETURNING value",
        (name, now_us),
    ).fetchone()
    return int(value)
