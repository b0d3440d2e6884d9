"""Seats: each gives a prefetch three lanes in the ballot, the same on every rank.

A prefetch takes the lowest free seat when it enters the ballot, and keeps it until it leaves. What the
lanes of a seat mean is its row: whose they are, in which phase, and up to which bound. Rows change by
command and by verdict, as all replicated state does. A round is launched under a frozen table of them,
which stays as it is whatever changes later, so that the verdict is read as it was voted for.
"""

from array import array
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import InternalError
from .operation import Phase

UNBOUNDED = 1 << 40
"""A bound, or a ceiling, that no page count reaches."""

NOBODY = 0
"""The operation of a seat that is free: ids begin at 1."""

OPERATION, PHASE, BOUND = 0, 1, 2
COLUMNS = 3
"""The columns of a row are operation, phase and bound."""

Rows = npt.NDArray[np.int64]
"""One row for each seat."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The meaning of the lanes of one seat."""

    operation: int
    phase: Phase
    bound: int = UNBOUNDED
    """No rank votes for a longer length than this, while the ranks agree on one."""


@dataclass(frozen=True, slots=True, eq=False)
class SeatTable:
    """The meaning of the lanes of all seats in one round. Never changes."""

    rows: Rows
    """Read-only."""
    digest: int
    """63 bits that differ where the rows differ."""

    def taken(self) -> dict[int, Seat]:
        """Return by number, in order, the seats that are not free."""
        return {
            number: Seat(operation, Phase(phase), bound)
            for number, (operation, phase, bound) in enumerate(self.rows.tolist())
            if operation != NOBODY
        }


class Seats:
    """The seats of one replica. Not thread-safe; one owner."""

    def __init__(self, count: int) -> None:
        self._cells = array("q", [NOBODY, 0, 0] * count)
        """The rows, one after the other; an element of an `array` is cheap to write."""
        self._free = list(range(count))
        """The numbers of free seats as a heap: ascending numbers are one."""
        self._frozen: SeatTable | None = None

    @property
    def taken(self) -> int:
        """How many seats are taken."""
        return len(self._cells) // COLUMNS - len(self._free)

    def take(self, operation: int, phase: Phase, bound: int = UNBOUNDED) -> int:
        """Give `operation` the lowest free seat, and return it."""
        if not self._free:
            count = len(self._cells) // COLUMNS
            raise InternalError(f"operation {operation} finds all {count} seats taken")
        seat = heappop(self._free)
        cells, at = self._cells, seat * COLUMNS
        cells[at + OPERATION], cells[at + PHASE], cells[at + BOUND] = operation, phase, bound
        self._frozen = None
        return seat

    def change(self, seat: int, phase: Phase, bound: int = UNBOUNDED) -> None:
        """Give the lanes of a seat that is taken another meaning."""
        cells, at = self._cells, self._taken_at(seat)
        cells[at + PHASE], cells[at + BOUND] = phase, bound
        self._frozen = None

    def give_back(self, seat: int) -> None:
        """Let a seat that is taken be free."""
        cells, at = self._cells, self._taken_at(seat)
        cells[at + OPERATION], cells[at + PHASE], cells[at + BOUND] = NOBODY, 0, 0
        heappush(self._free, seat)
        self._frozen = None

    def freeze(self) -> SeatTable:
        """Return the table of the seats as they are now; the last one if nothing has changed since."""
        if self._frozen is None:
            cells = self._cells.tobytes()
            rows = np.frombuffer(cells, dtype=np.int64).reshape(-1, COLUMNS)
            self._frozen = SeatTable(rows, xxhash.xxh3_64_intdigest(cells) >> 1)
        return self._frozen

    def _taken_at(self, seat: int) -> int:
        """Return where the row of a seat begins that is taken."""
        at = seat * COLUMNS
        if self._cells[at + OPERATION] == NOBODY:
            raise InternalError(f"seat {seat} is free")
        return at
