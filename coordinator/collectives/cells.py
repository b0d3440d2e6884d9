"""The memory that the ranks of one host share: a cell for each writer and each of two rounds.

    header    magic, writers, lanes, ending; padded to a cache line
    cells     [round % 2][writer]: round number, checksum, padding; the lanes, padded

Two rounds are enough: nobody writes round k + 2 before it has read round k + 1 of all, and so nobody
does while another still reads round k. A cell is written from the back: lanes, checksum, number. Its
checksum is seeded with the number and checked over a copy, so that a reader never takes part of one
round for another, in whatever order a processor lets it see the writes.
"""

from mmap import mmap
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ...errors import InternalError
from .base import Vector
from .futex import Futex

if TYPE_CHECKING:
    import numpy.typing as npt

_LINE = 8
"""Words in a cache line: what one rank writes shares none with what another does."""

_MAGIC = 0x6C6F636B73746570
_MAGIC_AT, _WRITERS_AT, _LANES_AT, _ENDING_AT = range(4)
_NUMBER_AT, _CHECK_AT = range(2)


def _padded(words: int) -> int:
    return -(-words // _LINE) * _LINE


class Cells:
    """One process's view of the memory. Knows nothing of ranks, deadlines or processes."""

    def __init__(self, memory: mmap, writers: int, lanes: int, futex: Futex) -> None:
        """`memory` is zeroed, or has been through `begin`; it is kept until `close`."""
        words = np.frombuffer(memory, dtype=np.int64)
        cells = words[_LINE:].reshape(2, writers, _LINE + _padded(lanes))
        self.writers, self.lanes = writers, lanes
        self._header: Vector = words[:_LINE]
        self._numbers = [cells[parity, :, _NUMBER_AT] for parity in (0, 1)]
        self._checks = [cells[parity, :, _CHECK_AT] for parity in (0, 1)]
        self._bodies = [cells[parity, :, _LINE : _LINE + lanes] for parity in (0, 1)]
        # The lower half of a number, which is what a futex can compare, comes first.
        self._addresses = [
            [int(cells[parity, writer].ctypes.data) for writer in range(writers)]
            for parity in (0, 1)
        ]
        self._futex = futex

    @staticmethod
    def size(writers: int, lanes: int) -> int:
        """Return the number of bytes that the memory has."""
        return 8 * (_LINE + 2 * writers * (_LINE + _padded(lanes)))

    def begin(self) -> None:
        """Mark new memory as made for this many writers and lanes."""
        self._header[_WRITERS_AT], self._header[_LANES_AT] = self.writers, self.lanes
        self._header[_MAGIC_AT] = _MAGIC

    def require_begun(self) -> None:
        """Raise `InternalError` unless the memory was made for this many writers and lanes."""
        found = self._header[: _LANES_AT + 1].tolist()
        if found != [_MAGIC, self.writers, self.lanes]:
            raise InternalError(
                f"shared memory for {self.writers} writers of {self.lanes} lanes begins with {found}"
            )

    @property
    def ending(self) -> int:
        """The word that says how the group has ended; 0 while it lasts."""
        return int(self._header[_ENDING_AT])

    @ending.setter
    def ending(self, word: int) -> None:
        self._header[_ENDING_AT] = word

    def write(self, writer: int, number: int, lanes: Vector) -> None:
        """Publish the lanes of a round, which are copied, and wake who waits for them."""
        parity = number & 1
        self._bodies[parity][writer] = lanes
        self._checks[parity][writer] = _checksum(lanes, number)
        self._numbers[parity][writer] = number
        self._futex.wake(self._addresses[parity][writer])

    def is_there(self, number: int, first: int, last: int) -> bool:
        """Say whether the writers `first` to `last` - 1 have all written a round."""
        written: list[int] = self._numbers[number & 1][first:last].tolist()
        return written == [number] * (last - first)

    def read(self, number: int, first: int, last: int) -> "npt.NDArray[np.int64] | None":
        """Return a copy of the lanes of the writers `first` to `last` - 1, one row for each.

        None unless all have written this round. `number` is the latest that was written, or later.
        """
        if not self.is_there(number, first, last):
            return None
        parity = number & 1
        rows = self._bodies[parity][first:last].copy()
        checks = self._checks[parity][first:last].tolist()
        for row, check in zip(rows, checks, strict=True):
            if _checksum(row, number) != check:
                return None
        return rows

    def missing(self, number: int, first: int, last: int) -> list[int]:
        """Return which of the writers `first` to `last` - 1 have not written the round."""
        written = self._numbers[number & 1][first:last].tolist()
        return [first + at for at, each in enumerate(written) if each != number]

    def sleep(self, writer: int, number: int, timeout_s: float) -> None:
        """Sleep until a writer writes the round, or for `timeout_s`, or for less."""
        parity = number & 1
        seen = int(self._numbers[parity][writer])
        if seen != number:
            expected = seen & 0xFFFFFFFF
            self._futex.sleep(self._addresses[parity][writer], expected, timeout_s)

    def damaged(self, number: int, first: int, last: int) -> list[int]:
        """Return which of the writers `first` to `last` - 1 have lanes that fail their checksum.

        All have written the round. One may fail for a moment, while a processor sees its writes in
        another order than they were made.
        """
        bodies = self._bodies[number & 1][first:last].copy()
        checks = self._checks[number & 1][first:last].tolist()
        return [
            first + at
            for at, (body, check) in enumerate(zip(bodies, checks, strict=True))
            if _checksum(body, number) != check
        ]

    def close(self) -> None:
        """Let go of the memory, whoever still refers to this object; nothing but `ending` may follow.

        An error that ended an epoch is kept with all that its frames refer to.
        """
        self._header = self._header.copy()
        for views in (self._numbers, self._checks, self._bodies, self._addresses):
            views.clear()

    def wake_all(self) -> None:
        """Wake everybody who sleeps, to look at the ending."""
        for addresses in self._addresses:
            for address in addresses:
                self._futex.wake(address)


def _checksum(lanes: Vector, number: int) -> int:
    return xxhash.xxh3_64_intdigest(lanes.data, number) >> 1
