"""How a reader and a server show each other that they know the same secret, before anything else.

    both    greeting: magic (8 bytes), version (2), zeros (2), nonce (32)
    reader  proof (32): HMAC-SHA256 by the secret, of "reader" and both greetings, the reader's first
    server  verdict (1), and its own proof (32), of "server" and both greetings; zeros with a refusal

Nonces are new for each connection, so nothing that was heard once proves anything. The reader shows
its proof first, and a server that does not know the secret is found out before it is told or asked
anything. Where no secret is set, it is empty, and the same is done. What follows the handshake is
neither encrypted nor signed.
"""

import asyncio
import hmac
import secrets
import socket
import struct
from enum import IntEnum
from typing import Final

from ...errors import ConfigError, StorageError
from .wire import VERSION

MAGIC: Final = b"LOCKPEER"
GREETING: Final = struct.Struct("<8sHH32s")
_PROOF_BYTES: Final = 32


class Verdict(IntEnum):
    """What a server says to a reader's proof."""

    WELCOME = 0
    WRONG_SECRET = 1
    FULL = 2
    """It has as many readers as it may have."""


async def greet_server(sock: socket.socket, secret: bytes, store: str) -> None:
    """Do the reader's part; `store` is what messages call the server.

    Raises `ConfigError` for another version or secret, and `StorageError` or `OSError` for what may
    pass.
    """
    ours = greeting()
    await _send(sock, ours)
    theirs = await _receive(sock, GREETING.size)
    magic, version, _, _ = GREETING.unpack(theirs)
    if magic != MAGIC:
        raise ConfigError(f"store {store!r}: there is no rank of Lockstep; check host and port")
    if version != VERSION:
        raise ConfigError(
            f"store {store!r} speaks version {version} of the protocol and this process {VERSION};"
            " run the same version of Lockstep in both groups"
        )
    await _send(sock, _proof(secret, b"reader", ours, theirs))
    answer = await _receive(sock, 1 + _PROOF_BYTES)
    if answer[0] == Verdict.FULL:
        raise StorageError(f"store {store!r} has as many readers as it may have")
    known = hmac.compare_digest(answer[1:], _proof(secret, b"server", ours, theirs))
    if answer[0] != Verdict.WELCOME or not known:
        raise ConfigError(
            f"store {store!r} has another secret; give both groups the same one (secret=)"
        )


async def greet_reader(sock: socket.socket, secret: bytes, *, full: bool) -> None:
    """Do the server's part; raises `StorageError` or `OSError` if this reader is not to be served."""
    ours = greeting()
    await _send(sock, ours)
    theirs = await _receive(sock, GREETING.size)
    magic, version, _, _ = GREETING.unpack(theirs)
    if magic != MAGIC:
        raise StorageError("it is no reader of Lockstep")
    if version != VERSION:
        raise StorageError(
            f"it speaks version {version} of the protocol and this process {VERSION}; run the same"
            " version of Lockstep in both groups"
        )
    proof = await _receive(sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"reader", theirs, ours)):
        await _send(sock, bytes([Verdict.WRONG_SECRET]) + bytes(_PROOF_BYTES))
        raise StorageError("it has another secret; give both groups the same one")
    if full:
        await _send(sock, bytes([Verdict.FULL]) + bytes(_PROOF_BYTES))
        raise StorageError("there are as many readers as there may be")
    await _send(sock, bytes([Verdict.WELCOME]) + _proof(secret, b"server", theirs, ours))


async def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`; raises `ConnectionResetError` if the other side hangs up before."""
    loop = asyncio.get_running_loop()
    while view:
        count = await loop.sock_recv_into(sock, view)
        if not count:
            raise ConnectionResetError("the other side has hung up")
        view = view[count:]


def greeting() -> bytes:
    """Return a new greeting of this version."""
    return GREETING.pack(MAGIC, VERSION, 0, secrets.token_bytes(32))


def _proof(secret: bytes, role: bytes, readers: bytes, servers: bytes) -> bytes:
    return hmac.digest(secret, role + readers + servers, "sha256")


async def _send(sock: socket.socket, raw: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, raw)


async def _receive(sock: socket.socket, count: int) -> bytes:
    raw = bytearray(count)
    await receive_exactly(sock, memoryview(raw))
    return bytes(raw)
