"""Encode values that pass between processes as msgpack of a type that both sides declare (rule R11).

Nothing is pickled. Decoded values have the declared type down to the last field; a tag selects the
member of a union of `Record` types.
"""

from typing import Any, Generic, TypeVar

import msgspec

from ..errors import LockstepError, WireError

BYTES_MAX = 1 << 28
"""The maximum size of one value in bytes. The orders of one step name tens of thousands of keys."""

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of values that may leave a process, encoded as type name and then fields in order."""


class Codec(Generic[T]):
    """Encodes and decodes values of one type, which also bounds the nesting depth."""

    def __init__(
        self, kind: Any, *, bytes_max: int = BYTES_MAX, error: type[LockstepError] = WireError
    ) -> None:
        """Build a codec for `kind`, which is T and may be a union; bad input raises `error`."""
        self._bytes_max = bytes_max
        self._error = error
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def encode(self, value: T) -> bytes:
        """Return a value as bytes. Raises the codec's error if it cannot be encoded or is too large."""
        try:
            data = self._encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._error(f"a message cannot be written: {error}") from error
        self._require_room(len(data))
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """Return the decoded value; raises the codec's error, with the position, for bad bytes."""
        self._require_room(len(data))
        try:
            value: T = self._decode(data)
        except (ValueError, RecursionError) as error:
            raise self._error(f"a message of {len(data)} bytes cannot be read: {error}") from error
        return value

    def _require_room(self, nbytes: int) -> None:
        if nbytes > self._bytes_max:
            raise self._error(f"a message of {nbytes} bytes, must be at most {self._bytes_max}")
