"""Prefetch slots: each holds one prefetch and gives it three lanes, the same on every rank.

A prefetch takes the lowest free slot when it enters the ballot and keeps the slot until it leaves the
ballot. The slot's row (operation, phase, bound) defines its lanes. Rows are replicated state, changed
only by commands and verdicts. A round is launched with a frozen copy of the rows, and its verdict is
read with the same copy.
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
"""A bound (longest length to vote for) or ceiling (most pages that can land) of this value limits
nothing. The value is larger than any page count."""

NOBODY = 0
"""The operation id in the row of a free prefetch slot; real operation ids begin at 1."""

OPERATION, PHASE, BOUND = 0, 1, 2
COLUMNS = 3

Rows = npt.NDArray[np.int64]
"""An array with one row (operation, phase, bound) for each prefetch slot."""


@dataclass(frozen=True, slots=True)
class PrefetchSlot:
    """The row of one occupied prefetch slot; the row determines what the slot's lanes mean."""

    operation: int
    phase: Phase
    bound: int = UNBOUNDED
    """The longest length, in pages, that a rank may vote for while the ranks agree on a length."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchSlotTable:
    """The rows of all prefetch slots in one round, which define the slots' lanes. Immutable."""

    rows: Rows
    """The rows of all prefetch slots; read-only."""
    digest: int
    """A 63-bit digest of the rows."""

    def taken(self) -> dict[int, PrefetchSlot]:
        """Return the occupied prefetch slots, keyed by slot number in ascending order."""
        return {
            number: PrefetchSlot(operation, Phase(phase), bound)
            for number, (operation, phase, bound) in enumerate(self.rows.tolist())
            if operation != NOBODY
        }


class PrefetchSlots:
    """The prefetch slots of one replica. Not thread-safe; one owner."""

    def __init__(self, count: int) -> None:
        self._cells = array("q", [NOBODY, 0, 0] * count)
        """The rows, concatenated. An `array` is used because its elements are cheap to write."""
        self._free = list(range(count))
        """The numbers of free prefetch slots, as a heap."""
        self._frozen: PrefetchSlotTable | None = None

    @property
    def taken(self) -> int:
        """The number of occupied prefetch slots."""
        return len(self._cells) // COLUMNS - len(self._free)

    def take(self, operation: int, phase: Phase, bound: int = UNBOUNDED) -> int:
        """Assign the lowest free prefetch slot to `operation` and return its number."""
        if not self._free:
            count = len(self._cells) // COLUMNS
            raise InternalError(f"operation {operation} finds no free prefetch slot of {count}")
        prefetch_slot = heappop(self._free)
        cells, at = self._cells, prefetch_slot * COLUMNS
        cells[at + OPERATION], cells[at + PHASE], cells[at + BOUND] = operation, phase, bound
        self._frozen = None
        return prefetch_slot

    def change(self, prefetch_slot: int, phase: Phase, bound: int = UNBOUNDED) -> None:
        """Set the phase and bound of an occupied prefetch slot."""
        cells, at = self._cells, self._taken_at(prefetch_slot)
        cells[at + PHASE], cells[at + BOUND] = phase, bound
        self._frozen = None

    def give_back(self, prefetch_slot: int) -> None:
        """Free an occupied prefetch slot."""
        cells, at = self._cells, self._taken_at(prefetch_slot)
        cells[at + OPERATION], cells[at + PHASE], cells[at + BOUND] = NOBODY, 0, 0
        heappush(self._free, prefetch_slot)
        self._frozen = None

    def freeze(self) -> PrefetchSlotTable:
        """Return a frozen copy of all rows; the same object as before if nothing changed."""
        if self._frozen is None:
            cells = self._cells.tobytes()
            rows = np.frombuffer(cells, dtype=np.int64).reshape(-1, COLUMNS)
            self._frozen = PrefetchSlotTable(rows, xxhash.xxh3_64_intdigest(cells) >> 1)
        return self._frozen

    def _taken_at(self, prefetch_slot: int) -> int:
        """Return the offset of a prefetch slot's row; raise `InternalError` if the slot is free."""
        at = prefetch_slot * COLUMNS
        if self._cells[at + OPERATION] == NOBODY:
            raise InternalError(f"prefetch slot {prefetch_slot} is free")
        return at
