"""What rank 0 and the ranks that follow its inbox tell each other over TCP.

A connection begins with a handshake (`storage_backends/handshake.py`). From then on each side sends
frames: the length in four bytes, big-endian, and one msgpack array of a kind and that kind's fields.

    kind      who                  fields
    FOLLOW    a rank to rank 0     its rank, how many messages it has
    MESSAGE   rank 0 to a rank     number, content
    HAVE      a rank to rank 0     how many messages it has in a row
    REFUSED   rank 0 to a rank     a sentence

Kinds and their fields never change their meaning; what is added raises `VERSION`, which the handshake
compares. What does not fit ends its connection, before anything is allocated by what it claims.
"""

import asyncio
import struct
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final

import msgpack

from ....errors import MessageError
from ....storage_backends.handshake import NotAdmitted, admit, introduce
from ...protocol.host_port import canonical_address, split_address

VERSION: Final = 3
_MAGIC: Final = b"LOCKMSGS"
FRAME_BYTES_OVER: Final = 1 << 10
"""How many bytes a frame may have beyond those of the message in it."""
_SENTENCE_MAX: Final = 512

_LENGTH = struct.Struct(">I")


class Kind(IntEnum):
    """The kinds of frame."""

    FOLLOW = 1
    MESSAGE = 2
    HAVE = 3
    REFUSED = 4


_FIELDS: Final[dict[Kind, tuple[type, ...]]] = {
    Kind.FOLLOW: (int, int),
    Kind.MESSAGE: (int, bytes),
    Kind.HAVE: (int,),
    Kind.REFUSED: (str,),
}


class Connection:
    """One TCP connection, as frames. Owned by one event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, bytes_max: int
    ) -> None:
        """A message in a frame that comes may have up to `bytes_max` bytes."""
        self._reader = reader
        self._writer = writer
        self._bytes_max = bytes_max

    @classmethod
    async def to(cls, host: str, port: int, *, bytes_max: int, secret: bytes) -> "Connection":
        """Connect, and show that this side knows the secret.

        Raises `OSError`, `EOFError` or `MessageError`.
        """
        reader, writer = await asyncio.open_connection(host, port)
        connection = cls(reader, writer, bytes_max=bytes_max)
        try:
            meant = canonical_address(host, port), connection._place("peername")
            await introduce(connection, magic=_MAGIC, version=VERSION, secret=secret, meant=meant)
        except NotAdmitted as error:
            connection.abort()
            raise MessageError(str(error)) from None
        except BaseException:
            connection.abort()
            raise
        return connection

    async def admit(self, secret: bytes, address: str) -> None:
        """Let whoever has connected show that it knows the secret, and show the same.

        It has to mean this process: by the `address` that others are told, or the one it has reached.
        """
        own = canonical_address(*split_address(address)), self._place("sockname")
        try:
            await admit(self, magic=_MAGIC, version=VERSION, secret=secret, own=own)
        except NotAdmitted as error:
            raise MessageError(str(error)) from None

    def _place(self, which: str) -> str:
        """Return the address of an end of the connection, `peername` or `sockname`."""
        found = self._writer.get_extra_info(which)
        if found is None:
            raise ConnectionResetError("the other side has hung up")
        host, port = found[:2]
        return canonical_address(host, port)

    async def read(self, count: int) -> bytes:
        """See `ByteStream`."""
        return await self._reader.readexactly(count)

    async def write(self, data: bytes) -> None:
        """See `ByteStream`; waits while the other side does not read."""
        self._writer.write(data)
        await self._writer.drain()

    async def send(self, kind: Kind, *fields: int | str | bytes) -> None:
        """Send a frame."""
        packed: bytes = msgpack.packb([kind, *fields])
        await self.write(_LENGTH.pack(len(packed)) + packed)

    async def refuse(self, why: str) -> None:
        """Say why the connection ends, and end it when that is on its way."""
        await self.send(Kind.REFUSED, why[:_SENTENCE_MAX])
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def receive(self, expected: Kind) -> list[Any]:
        """Return the fields of the next frame, which must be of the kind expected.

        Raises `MessageError` for anything else, and for what the other side has refused.
        """
        (length,) = _LENGTH.unpack(await self.read(_LENGTH.size))
        if length > self._bytes_max + FRAME_BYTES_OVER:
            raise MessageError(f"a message of {length} bytes, must be at most {self._bytes_max}")
        kind, fields = _unpacked(await self.read(length))
        if kind is Kind.REFUSED:
            raise MessageError(fields[0])
        if kind is not expected:
            raise MessageError(f"a {kind.name} frame out of its turn")
        return fields

    def abort(self) -> None:
        """End the connection at once, whatever was still to be sent."""
        self._writer.transport.abort()


def _unpacked(data: bytes) -> tuple[Kind, list[Any]]:
    try:
        parts: Any = msgpack.unpackb(data)
        kind, *fields = parts
        kind = Kind(kind)
        if tuple(map(type, fields)) != _FIELDS[kind]:
            raise TypeError(f"the fields of {kind.name} are of other types")
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"{len(data)} bytes are no frame: {error}") from error
    if any(each < 0 for each in fields if isinstance(each, int)):
        raise MessageError(f"a number of {kind.name} is negative")
    return kind, fields
