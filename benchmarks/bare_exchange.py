"""The limit of an exchange over shared memory: rows in one file, looked at until all are there.

No checksum, no sleep, no deadline, and nobody notices if a rank is gone: what is left is writing a row,
reading those of all, and the minimum.
"""

import mmap
import os
from pathlib import Path

import numpy as np

from ..coordinator.collective import Vector
from ..coordinator.fold import fold

_LINE = 8
"""Words in a cache line."""


class BareExchange:
    """One rank's side; all give the same file, which is zeroed and long enough."""

    def __init__(self, path: Path, rank: int, ranks: int, lanes: int) -> None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), self.size(ranks, lanes))
        words = np.frombuffer(memory, dtype=np.int64).reshape(2, ranks, -1)
        self._numbers, self._rows = words[:, :, 0], words[:, :, _LINE : _LINE + lanes]
        self._rank, self._ranks = rank, ranks
        self._number = 0

    @staticmethod
    def size(ranks: int, lanes: int) -> int:
        """Return the number of bytes that the file has."""
        return 2 * ranks * 8 * (_LINE + -(-lanes // _LINE) * _LINE)

    def exchange(self, lanes: Vector) -> Vector:
        """Return the minimum of what all ranks give."""
        self._number += 1
        parity, all_there = self._number & 1, [self._number] * self._ranks
        self._rows[parity, self._rank] = lanes
        self._numbers[parity, self._rank] = self._number
        numbers = self._numbers[parity]
        while numbers.tolist() != all_there:
            # Somebody may need this core to write.
            os.sched_yield()
        return fold(self._rows[parity])
