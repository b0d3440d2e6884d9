"""The handshake between readers and page servers over sockets (format: `..handshake`)."""

import asyncio
import socket
from typing import Final

from ...errors import ConfigError, StorageError
from ...ranks.protocol.host_port import canonical_address, split_address
from ..handshake import NotAdmitted, RefusalReason, UnprovenError, admit, introduce
from .frame_tags import ConnectionTags
from .wire import VERSION

MAGIC: Final = b"LOCKPEER"


class SocketStream:
    """The byte stream on which a handshake runs, over a non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def read(self, count: int) -> bytes:
        raw = bytearray(count)
        await receive_exactly(self._sock, memoryview(raw))
        return bytes(raw)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)


async def greet_server(
    sock: socket.socket, secret: bytes, store: str, address: str
) -> ConnectionTags:
    """Run the reader's side of the handshake; `address` is the configured address of the server.

    `store` is the server's name in error messages. Raises `UnprovenError` if the server does not prove
    that it knows the secret and owns the address, `ConfigError` for another version, and `StorageError`
    or `OSError` for temporary failures.
    """
    meant = canonical_address(*split_address(address)), _place(sock.getpeername())
    stream = SocketStream(sock)
    try:
        keys = await introduce(stream, magic=MAGIC, version=VERSION, secret=secret, meant=meant)
    except NotAdmitted as error:
        if error.why is RefusalReason.FULL:
            raise StorageError(f"store {store!r}: {error}") from None
        if error.why is RefusalReason.SECRET:
            raise UnprovenError(f"store {store!r}: {error} (secret=)") from None
        if error.why is RefusalReason.ADDRESS:
            raise UnprovenError(f"store {store!r}: {error} (reached_at of `peers`)") from None
        raise ConfigError(f"store {store!r}: {error}") from None
    return ConnectionTags.of_reader(secret, keys)


async def greet_reader(
    sock: socket.socket, secret: bytes, address: str, *, full: bool
) -> ConnectionTags:
    """Run the server's side of the handshake; raises `StorageError` or `OSError` if it fails.

    The reader must have dialled the server's published `address`, or the address of the server's
    socket.
    """
    own = canonical_address(*split_address(address)), _place(sock.getsockname())
    stream = SocketStream(sock)
    try:
        keys = await admit(stream, magic=MAGIC, version=VERSION, secret=secret, own=own, full=full)
    except NotAdmitted as error:
        hint = " (reached_at of `peers`)" if error.why is RefusalReason.ADDRESS else ""
        raise StorageError(f"{error}{hint}") from None
    return ConnectionTags.of_server(secret, keys)


def _place(name: tuple[str, int]) -> str:
    return canonical_address(*name[:2])


async def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` with received bytes; raises `ConnectionResetError` if the other side closes first."""
    loop = asyncio.get_running_loop()
    while view:
        count = await loop.sock_recv_into(sock, view)
        if not count:
            raise ConnectionResetError("the other side has closed the connection")
        view = view[count:]
