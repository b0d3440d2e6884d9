"""The handshake of readers and of ranks that serve pages, over sockets; see `..handshake`."""

import asyncio
import socket
from typing import Final

from ...errors import ConfigError, StorageError
from ..handshake import NotAdmitted, Why, admit, introduce
from .wire import VERSION

MAGIC: Final = b"LOCKPEER"


class SocketStream:
    """A socket that does not block, as a handshake reads and writes it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def read(self, count: int) -> bytes:
        """See `ByteStream`."""
        raw = bytearray(count)
        await receive_exactly(self._sock, memoryview(raw))
        return bytes(raw)

    async def write(self, data: bytes) -> None:
        """See `ByteStream`."""
        await asyncio.get_running_loop().sock_sendall(self._sock, data)


async def greet_server(sock: socket.socket, secret: bytes, store: str) -> None:
    """Do the reader's part; `store` is what messages call the server.

    Raises `ConfigError` for another version or secret, and `StorageError` or `OSError` for what may
    pass.
    """
    try:
        await introduce(SocketStream(sock), magic=MAGIC, version=VERSION, secret=secret)
    except NotAdmitted as error:
        if error.why is Why.FULL:
            raise StorageError(f"store {store!r}: {error}") from None
        hint = " (secret=)" if error.why is Why.SECRET else ""
        raise ConfigError(f"store {store!r}: {error}{hint}") from None


async def greet_reader(sock: socket.socket, secret: bytes, *, full: bool) -> None:
    """Do the server's part; raises `StorageError` or `OSError` if this reader is not to be served."""
    stream = SocketStream(sock)
    try:
        await admit(stream, magic=MAGIC, version=VERSION, secret=secret, full=full)
    except NotAdmitted as error:
        raise StorageError(str(error)) from None


async def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`; raises `ConnectionResetError` if the other side hangs up before."""
    loop = asyncio.get_running_loop()
    while view:
        count = await loop.sock_recv_into(sock, view)
        if not count:
            raise ConnectionResetError("the other side has hung up")
        view = view[count:]
