"""What the tests of page indexes share: keys, entries, and changes that no store makes."""

import sqlite3
from contextlib import closing
from pathlib import Path

from lockstep.storage_backends.page_index.contract import Entry, Reservation

LONG_S = 3600.0
"""A lease that does not end while a test runs."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def entry(number: int, lent: Reservation, present: int = 0) -> Entry:
    """What a writer says of a page that it has put into a slot."""
    return Entry(key(number), f"file {number}", lent.slot << 20, 1 << 14, present, lent.generation)


def alter(index: Path, *statements: str) -> None:
    """Do to the file of an SQLite index what no store does."""
    with closing(sqlite3.connect(index)) as database:
        database.executescript(";".join(statements))
