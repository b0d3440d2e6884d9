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
from ..collective import Vector
from .futex import Futex

if TYPE_CHECKING:
    import numpy.typing as npt

_LINE = 8
"""Words in a cache line. No two ranks write to the same line."""

_MAGIC = 0x6C6F636B73746570
_MAGIC_AT, _WRITERS_AT, _LANES_AT, _ENDING_AT = range(4)
_NUMBER_AT, _CHECK_AT = range(2)
"""A cell begins with its number."""


def _words_in_cell(lanes: int) -> int:
    """Return the words of a cell: a line for number and checksum, and lines for the lanes."""
    return _LINE + -(-lanes // _LINE) * _LINE


class CellSpan:
    """A reader's view of the cells of writers that follow each other; see `Cells.span`.

    A look calls as few functions as it can: it often comes after milliseconds of other work, and then
    each function is cold.
    """

    def __init__(
        self,
        first: int,
        words: memoryview,
        cells_at: tuple[tuple[int, ...], ...],
        bodies: "list[npt.NDArray[np.int64]]",
    ) -> None:
        """`first` is the first of the writers.

        By the parity of the round, `cells_at` has the words at which the cells begin, and `bodies`
        has their lanes, a row for each.
        """
        self._first = first
        self._words = words
        self._cells_at = cells_at
        self._bodies = bodies

    def is_there(self, number: int) -> bool:
        """Say whether all of them have written a round."""
        words = self._words
        for at in self._cells_at[number & 1]:  # noqa: SIM110 - a generator takes longer, cold.
            if words[at] != number:
                return False
        return True

    def read(self, number: int) -> "npt.NDArray[np.int64] | None":
        """Return a copy of their lanes, a row for each.

        Returns None unless all have written this round. No later round than `number` was written.
        """
        if not self.is_there(number):
            return None
        rows, damaged = self._copied(number)
        return None if damaged else rows

    def missing(self, number: int) -> list[int]:
        """Return which of them have not written the round."""
        words, cells_at = self._words, self._cells_at[number & 1]
        return [writer for writer, at in enumerate(cells_at, self._first) if words[at] != number]

    def damaged(self, number: int) -> list[int]:
        """Return which of them have lanes that fail their checksum, after all have written the round.

        One may fail for a moment, while a processor sees its writes in another order than they were
        made.
        """
        _, damaged = self._copied(number)
        return damaged

    def close(self) -> None:
        """Let go of the lanes; nothing may follow."""
        self._bodies.clear()

    def _copied(self, number: int) -> "tuple[npt.NDArray[np.int64], list[int]]":
        rows = self._bodies[number & 1].copy()
        words, cells_at = self._words, self._cells_at[number & 1]
        damaged = [
            self._first + row
            for row, at in enumerate(cells_at)
            if words[at + _CHECK_AT] != _checksum(rows[row], number)
        ]
        return rows, damaged


class Cells:
    """One process's view of the memory. Knows nothing of ranks, deadlines or processes."""

    def __init__(self, memory: mmap, writers: int, lanes: int, futex: Futex) -> None:
        """`memory` is zeroed, or has been through `stamp`; it is kept until `close`."""
        self.writers, self.lanes = writers, lanes
        stride = _words_in_cell(lanes)
        self._cells_at = [
            [_LINE + (parity * writers + writer) * stride for writer in range(writers)]
            for parity in (0, 1)
        ]
        # Single words are read and written through a view, since an array takes several times as long.
        self._words = memoryview(memory).cast("q")
        array = np.frombuffer(memory, dtype=np.int64)
        cells = array[_LINE:].reshape(2, writers, stride)
        self._bodies = [cells[parity, :, _LINE : _LINE + lanes] for parity in (0, 1)]
        # The lower half of a number, which is what a futex can compare, comes first.
        begins_at = array.ctypes.data
        self._addresses = [[begins_at + 8 * at for at in cells] for cells in self._cells_at]
        self._spans: list[CellSpan] = []
        self._futex = futex

    @staticmethod
    def size(writers: int, lanes: int) -> int:
        """Return the number of bytes that the memory has."""
        return 8 * (_LINE + 2 * writers * _words_in_cell(lanes))

    def span(self, first: int, last: int) -> CellSpan:
        """Return the cells of the writers `first` to `last` - 1, for as long as this is open."""
        cells_at = tuple(tuple(cells[first:last]) for cells in self._cells_at)
        span = CellSpan(first, self._words, cells_at, [each[first:last] for each in self._bodies])
        self._spans.append(span)
        return span

    def stamp(self) -> None:
        """Mark new memory as made for this many writers and lanes."""
        self._words[_WRITERS_AT], self._words[_LANES_AT] = self.writers, self.lanes
        self._words[_MAGIC_AT] = _MAGIC

    def require_stamped(self) -> None:
        """Raise `InternalError` unless the memory was made for this many writers and lanes."""
        found = self._words[: _LANES_AT + 1].tolist()
        if found != [_MAGIC, self.writers, self.lanes]:
            raise InternalError(
                f"shared memory for {self.writers} writers of {self.lanes} lanes begins with {found}"
            )

    @property
    def ending(self) -> int:
        """The word that says how the group has ended; 0 while it lasts."""
        return self._words[_ENDING_AT]

    @ending.setter
    def ending(self, word: int) -> None:
        self._words[_ENDING_AT] = word

    def write(self, writer: int, number: int, lanes: Vector) -> None:
        """Publish the lanes of a round, which are copied, and wake who waits for them."""
        parity = number & 1
        at = self._cells_at[parity][writer]
        self._bodies[parity][writer] = lanes
        self._words[at + _CHECK_AT] = _checksum(lanes, number)
        self._words[at + _NUMBER_AT] = number
        self._futex.wake(self._addresses[parity][writer])

    def sleep(self, writer: int, number: int, timeout_s: float) -> None:
        """Sleep until a writer writes the round, or for `timeout_s`, or for less."""
        parity = number & 1
        seen = self._words[self._cells_at[parity][writer] + _NUMBER_AT]
        if seen != number:
            expected = seen & 0xFFFFFFFF
            self._futex.sleep(self._addresses[parity][writer], expected, timeout_s)

    def close(self) -> None:
        """Let go of the memory, even if others still refer to this object; only `ending` may follow.

        An error that ended an epoch keeps alive all that its frames refer to, such as this object.
        """
        words = self._words
        self._words = memoryview(bytearray(words[:_LINE])).cast("q")
        # Whoever was interrupted with a reference to it finds out.
        words.release()
        for span in self._spans:
            span.close()
        for views in (self._spans, self._bodies, self._addresses):
            views.clear()

    def wake_all(self) -> None:
        """Wake everybody who sleeps, to look at the ending."""
        for addresses in self._addresses:
            for address in addresses:
                self._futex.wake(address)


def _checksum(lanes: Vector, number: int) -> int:
    return xxhash.xxh3_64_intdigest(lanes.data, number) >> 1
