"""A relay between a reader and a rank that forwards the handshake and can alter later frames."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

from lockstep.ranks.protocol.host_port import split_address
from lockstep.storage_backends.peer.frame_tags import TAG_BYTES
from lockstep.storage_backends.peer.wire import MESSAGES, PREFIX_BYTES, Message, decode_prefix

_GREETING_BYTES = 44
_PROOF_BYTES = 32


class Way(Enum):
    """The sender of a frame: the reader or the page server."""

    READER = "reader"
    SERVER = "server"


@dataclass(frozen=True)
class Passed:
    """One frame that passes the relay, including its authentication tags."""

    way: Way
    message: Message
    head: bytes
    """The bytes of the frame's prefix, control message and authentication tag."""
    attached: bytes

    @property
    def raw(self) -> bytes:
        return self.head + self.attached


Alter = Callable[[Passed], Sequence[bytes]]
"""Function that returns the bytes to forward in place of a frame."""


def unaltered(passed: Passed) -> list[bytes]:
    return [passed.raw]


class Tampering:
    """Relays one connection after the other, and records all bytes that each side sends."""

    def __init__(self, target: str, alter: Alter) -> None:
        self.connections = 0
        self._target, self._alter = target, alter
        self.sent: dict[Way, bytes] = {Way.READER: b"", Way.SERVER: b""}
        """All bytes that each side of the last connection has sent."""

    async def relay(self, reader: socket.socket) -> None:
        self.connections += 1
        self.sent = {Way.READER: b"", Way.SERVER: b""}
        server = socket.socket()
        with reader, server:
            server.setblocking(False)
            await asyncio.get_running_loop().sock_connect(server, split_address(self._target))
            both = (
                asyncio.create_task(self._pump(Way.READER, reader, server)),
                asyncio.create_task(self._pump(Way.SERVER, server, reader)),
            )
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _pump(self, way: Way, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        async def take(count: int) -> bytes:
            got = b""
            while len(got) < count:
                some = await loop.sock_recv(source, count - len(got))
                if not some:
                    raise ConnectionResetError
                got += some
            self.sent[way] += got
            return got

        await loop.sock_sendall(target, await take(_GREETING_BYTES))
        if way is Way.READER:
            length = await take(2)
            proof = await take(int.from_bytes(length, "big") + _PROOF_BYTES)
            await loop.sock_sendall(target, length + proof)
        else:
            await loop.sock_sendall(target, await take(1 + _PROOF_BYTES))
        while True:
            raw = await take(PREFIX_BYTES)
            control_bytes, attached_bytes = decode_prefix(memoryview(raw))
            control = await take(control_bytes)
            head = raw + control + await take(TAG_BYTES)
            attached_bytes += TAG_BYTES * bool(attached_bytes)
            passed = Passed(
                way, MESSAGES.decode(memoryview(control)), head, await take(attached_bytes)
            )
            for some in self._alter(passed):
                await loop.sock_sendall(target, some)


@asynccontextmanager
async def tampering(
    target: str, alter: Alter = unaltered, port: int = 0
) -> AsyncGenerator[tuple[Tampering, str]]:
    """Run a relay to the server at `target`; yield the relay and its own address."""
    made = Tampering(target, alter)
    loop = asyncio.get_running_loop()
    tasks = set[asyncio.Task[None]]()
    with socket.create_server(("127.0.0.1", port)) as listening:
        listening.setblocking(False)

        async def accept() -> None:
            while True:
                sock, _ = await loop.sock_accept(listening)
                sock.setblocking(False)
                tasks.add(asyncio.create_task(made.relay(sock)))

        tasks.add(asyncio.create_task(accept()))
        try:
            yield made, f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
