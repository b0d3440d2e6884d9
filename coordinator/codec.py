"""Values that pass between processes, as bytes: msgpack of a type that both sides declare (rule R11).

Nothing is pickled. What is read is of the declared type down to the last field: where that is a union
of `Record` types, the name in front of the fields says which of them it is, and no other type can come.
"""

from typing import Any, Generic, TypeVar

import msgspec

from ..errors import LockstepError, WireError

BYTES_MAX = 1 << 28
"""The most bytes of one value. The orders of a step name ten thousands of keys, not millions."""

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The base of values that may leave a process: the name of the type, then its fields in order."""


class Codec(Generic[T]):
    """Writes and reads values of one type. How deep they are nested follows from the type."""

    def __init__(
        self, kind: Any, *, bytes_max: int = BYTES_MAX, error: type[LockstepError] = WireError
    ) -> None:
        """`kind` is T, which may be a union; `error` is raised for what is no value of it."""
        self._bytes_max = bytes_max
        self._error = error
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def encode(self, value: T) -> bytes:
        """Return a value as bytes. Raises the error for one that has no bytes, or too many."""
        try:
            data = self._encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._error(f"a message cannot be written: {error}") from error
        self._require_room(len(data))
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """Return the value that was written. Raises the error for other bytes, and says where."""
        self._require_room(len(data))
        try:
            value: T = self._decode(data)
        except (ValueError, RecursionError) as error:
            raise self._error(f"a message of {len(data)} bytes cannot be read: {error}") from error
        return value

    def _require_room(self, nbytes: int) -> None:
        if nbytes > self._bytes_max:
            raise self._error(f"a message of {nbytes} bytes, must be at most {self._bytes_max}")
