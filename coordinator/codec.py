"""Msgpack encoding of values that pass between processes, each with a declared type (rule R11).

Nothing is pickled. Both sides declare the type, and decoding checks the value against it down to the
last field. In a union of `Record` types, a tag names the type of the value.
"""

from typing import Any, Generic, TypeVar

import msgspec

from ..errors import LockstepError, WireError

BYTES_MAX = 1 << 28
"""The maximum size of one encoded value in bytes. The maximum is this large because one step's
instructions to the executor may name tens of thousands of page keys."""

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class of values that may be sent to another process: encoded as type name, then fields."""


class Codec(Generic[T]):
    """Encodes and decodes values of one type. Refuses messages that are nested deeper than the type."""

    def __init__(
        self, kind: Any, *, bytes_max: int = BYTES_MAX, error: type[LockstepError] = WireError
    ) -> None:
        """Build a codec for the type `kind`, which may be a union; invalid data raises `error`."""
        self._bytes_max = bytes_max
        self._error = error
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def encode(self, value: T) -> bytes:
        """Encode a value. Raise the codec's error if the value cannot be encoded or is too large."""
        try:
            data = self._encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._error(f"a message cannot be written: {error}") from error
        self._require_room(len(data))
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """Decode bytes. Raise the codec's error, which names the position, if the bytes are invalid."""
        self._require_room(len(data))
        try:
            value: T = self._decode(data)
        except (ValueError, RecursionError) as error:
            raise self._error(f"a message of {len(data)} bytes cannot be read: {error}") from error
        return value

    def _require_room(self, nbytes: int) -> None:
        if nbytes > self._bytes_max:
            raise self._error(f"a message of {nbytes} bytes, must be at most {self._bytes_max}")
