"""Optional columns of a page: which of them an object or a buffer has, and where they lie in it.

Engines that share a store need not keep the same columns: the KV of a draft model is there only where
one runs (rule R5). So the layout says which columns are optional, in which order, and how long each
is; and *presence bits* say of one object which of them it has, bit i for the i-th. A payload begins
with the columns that every engine keeps, and the optional ones that are present follow in order.

Everything here is pure. All lengths come from the layout; an object only says which bits are set.
"""

from dataclasses import dataclass
from typing import Final

from ..errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalColumns:
    """The optional columns of a layout, and those among them that a caller's buffer has."""

    nbytes: tuple[int, ...] = ()
    """The length of each, also of those that the buffer does not have."""
    present: int = 0
    """The presence bits of the buffer."""

    def __post_init__(self) -> None:
        if not self.knows(self.present):
            raise InternalError(
                f"presence bits {self.present:#x} are set of {len(self.nbytes)} optional columns"
            )

    def knows(self, present: int) -> bool:
        """Say whether every bit of `present` stands for a column of the layout."""
        return present >= 0 and not present >> len(self.nbytes)

    @property
    def told_by_length(self) -> bool:
        """Whether no other presence bits give a payload of the buffer's length."""
        return self.present in (0, (1 << len(self.nbytes)) - 1)

    def lacks(self, present: int) -> bool:
        """Say whether the buffer has a column that an object with the bits `present` lacks."""
        return bool(self.present & ~present)

    def payload_bytes(self, buffer_bytes: int, present: int) -> int:
        """Return the length of the payload of an object with the bits `present`.

        `buffer_bytes` is the buffer's own. The result is negative if that is no length which a
        buffer with these columns can have.
        """
        return buffer_bytes - self._bytes_of(self.present) + self._bytes_of(present)

    def pick(self, payload: memoryview, present: int, buffer: memoryview) -> None:
        """Fill the buffer from the payload of an object that has all of its columns, and others."""
        required, theirs = self._divide(payload, present)
        at = len(required)
        buffer[:at] = required
        for number in self._numbers(self.present):
            column = theirs[number]
            buffer[at : at + len(column)] = column
            at += len(column)

    def unite(self, buffer: memoryview, payload: memoryview, present: int) -> memoryview:
        """Return the buffer's columns as a payload, with those of another object that it lacks.

        `payload` and `present` are the other object's. The bits of the result are those of both.
        """
        required, ours = self._divide(buffer, self.present)
        _, theirs = self._divide(payload, present)
        columns = theirs | ours
        return memoryview(b"".join([required, *(columns[number] for number in sorted(columns))]))

    def _divide(
        self, payload: memoryview, present: int
    ) -> tuple[memoryview, dict[int, memoryview]]:
        """Return the columns of a payload that are not optional, and the others by their number."""
        at = len(payload) - self._bytes_of(present)
        required, optional = payload[:at], dict[int, memoryview]()
        for number in self._numbers(present):
            optional[number] = payload[at : at + self.nbytes[number]]
            at += self.nbytes[number]
        return required, optional

    def _numbers(self, present: int) -> list[int]:
        return [number for number in range(len(self.nbytes)) if present >> number & 1]

    def _bytes_of(self, present: int) -> int:
        return sum(self.nbytes[number] for number in self._numbers(present)) if present else 0


NONE_OPTIONAL: Final = OptionalColumns()
"""Of objects whose layout has no optional column."""
