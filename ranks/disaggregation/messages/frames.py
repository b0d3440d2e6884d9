"""What the processes that send, number and receive messages tell each other over TCP.

A connection begins with a handshake (`storage_backends/handshake.py`). From then on each side sends
frames: the length in four bytes, big-endian, and one msgpack array of a kind and that kind's fields.

    kind      who                     fields
    FOLLOW    a rank to rank 0        the start of the group, its rank, how many messages it has
    MESSAGE   rank 0 to a rank        number, content
    HAVE      a rank to rank 0        how many messages it has in a row
    SEND      a sender to rank 0      sender, sequence, content
    TAKEN     rank 0 to a sender      sequence, the message's number
    REFUSED   rank 0 to both          sequence or 0, the kind of refusal, a sentence
    BOUND     rank 0 to both, first   how many bytes a message may have

Kinds and their fields never change their meaning; what is added raises `VERSION`, which the handshake
compares. What does not fit ends its connection, before anything is allocated by what it claims.
"""

import asyncio
import struct
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final

import msgpack

from ....storage_backends.handshake import NotAdmitted, Why, admit, introduce
from ....storage_backends.host_port import canonical_address, split_address
from ..refusal import Refusal, Refused

VERSION: Final = 2
_MAGIC: Final = b"LOCKMSGS"
FRAME_BYTES_OVER: Final = 1 << 10
"""How many bytes a frame may have beyond those of the message in it."""
SENTENCE_MAX: Final = 512
"""The most characters of a sentence that is told."""

_LENGTH = struct.Struct(">I")

_REFUSALS: Final = {
    Why.STRANGER: Refusal.MALFORMED,
    Why.VERSION: Refusal.VERSION,
    Why.SECRET: Refusal.SECRET,
    Why.ADDRESS: Refusal.SECRET,
    Why.FULL: Refusal.FULL,
}


class Kind(IntEnum):
    """The kinds of frame."""

    FOLLOW = 1
    MESSAGE = 2
    HAVE = 3
    SEND = 4
    TAKEN = 5
    REFUSED = 6
    BOUND = 7


_FIELDS: Final[dict[Kind, tuple[type, ...]]] = {
    Kind.FOLLOW: (bytes, int, int),
    Kind.MESSAGE: (int, bytes),
    Kind.HAVE: (int,),
    Kind.SEND: (bytes, int, bytes),
    Kind.TAKEN: (int, int),
    Kind.REFUSED: (int, str, str),
    Kind.BOUND: (int,),
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

        Raises `OSError`, `EOFError` or `Refused`.
        """
        reader, writer = await asyncio.open_connection(host, port)
        connection = cls(reader, writer, bytes_max=bytes_max)
        try:
            meant = canonical_address(host, port), connection.place("peername")
            await introduce(connection, magic=_MAGIC, version=VERSION, secret=secret, meant=meant)
        except NotAdmitted as error:
            connection.abort()
            raise Refused(_REFUSALS[error.why], str(error)) from None
        except BaseException:
            connection.abort()
            raise
        return connection

    async def admit(self, secret: bytes, address: str) -> None:
        """Let whoever has connected show that it knows the secret, and show the same.

        It has to mean this process: by the `address` that others are told, or the one it has reached.
        """
        own = canonical_address(*split_address(address)), self.place("sockname")
        try:
            await admit(self, magic=_MAGIC, version=VERSION, secret=secret, own=own)
        except NotAdmitted as error:
            raise Refused(_REFUSALS[error.why], str(error)) from None

    def place(self, which: str) -> str:
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

    async def refuse(self, sequence: int, refused: Refused) -> None:
        """Say why something is refused; 0 stands for all that was and will be said."""
        await self.send(Kind.REFUSED, sequence, refused.refusal, str(refused)[:SENTENCE_MAX])

    async def receive(self, *expected: Kind) -> tuple[Kind, Any]:
        """Return the next frame's kind, one of those expected, and its fields.

        Raises `Refused` (MALFORMED or TOO_LARGE) for what is no such frame, and what the other side
        has refused with sequence 0.
        """
        (length,) = _LENGTH.unpack(await self.read(_LENGTH.size))
        if length > self._bytes_max + FRAME_BYTES_OVER:
            raise Refused(
                Refusal.TOO_LARGE, f"a message of {length} bytes, must be at most {self._bytes_max}"
            )
        kind, fields = _unpacked(await self.read(length))
        if kind is Kind.REFUSED and not fields[0]:
            raise refused_as(fields[1], fields[2])
        if kind not in expected:
            raise Refused(Refusal.MALFORMED, f"a {kind.name} frame out of its turn")
        return kind, fields

    def abort(self) -> None:
        """End the connection at once, whatever was still to be sent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection when what was sent is on its way."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


def refused_as(value: str, sentence: str) -> Refused:
    """Return what the other side has refused, as it said it."""
    try:
        return Refused(Refusal(value), sentence)
    except ValueError:
        return Refused(Refusal.MALFORMED, f"a refusal of the unknown kind {value!r}: {sentence}")


def _unpacked(data: bytes) -> tuple[Kind, list[Any]]:
    try:
        parts: Any = msgpack.unpackb(data)
        kind, *fields = parts
        kind = Kind(kind)
        if tuple(map(type, fields)) != _FIELDS[kind]:
            raise TypeError(f"the fields of {kind.name} are of other types")
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise Refused(Refusal.MALFORMED, f"{len(data)} bytes are no frame: {error}") from error
    if any(each < 0 for each in fields if isinstance(each, int)):
        raise Refused(Refusal.MALFORMED, f"a number of {kind.name} is negative")
    return kind, fields
