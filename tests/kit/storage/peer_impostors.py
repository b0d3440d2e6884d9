"""Fake page servers that send exactly the bytes that a test scripts."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from lockstep.ranks.protocol.host_port import joined_address
from lockstep.storage_backends.peer.handshake import greet_reader
from lockstep.storage_backends.peer.wire import (
    MESSAGES,
    PREFIX_BYTES,
    Hello,
    Message,
    PeerRank,
    decode_prefix,
    encode,
)
from tests.kit.storage.calls import object_name


class Impostor:
    """A fake server's side of one connection from a reader."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address

    async def greet(self, secret: bytes = b"") -> None:
        await greet_reader(self.sock, secret, self.address, full=False)

    async def hello(self) -> None:
        """Send a hello with the namespace, pool and shard that all names from `object_name` have."""
        name = object_name(0)
        rank = PeerRank(self.address, ((name.pool, name.shard),))
        await self.say(encode(Hello(0, name.namespace, (rank,))))

    async def welcome(self) -> None:
        await self.greet()
        await self.hello()

    async def say(self, raw: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, raw)

    async def receive(self) -> Message:
        """Receive and return the reader's next message."""
        control_bytes, _ = decode_prefix(memoryview(await self._exactly(PREFIX_BYTES)))
        return MESSAGES.decode(memoryview(await self._exactly(control_bytes)))

    async def hung_up(self) -> None:
        """Wait until the reader closes the connection."""
        try:
            while await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16):
                pass
        except ConnectionResetError:
            return

    async def _exactly(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            some = await asyncio.get_running_loop().sock_recv(self.sock, count - len(got))
            assert some, "the reader has hung up"
            got += some
        return got


Behave = Callable[[Impostor], Awaitable[None]]


@asynccontextmanager
async def impostor(behave: Behave) -> AsyncGenerator[str]:
    """Run a fake server that calls `behave` for one connection after the other; yield its address."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = joined_address(*listening.getsockname()[:2])

        async def serve() -> None:
            while True:
                sock, _ = await loop.sock_accept(listening)
                with sock:
                    sock.setblocking(False)
                    await behave(Impostor(sock, address))

        serving = asyncio.create_task(serve())
        try:
            yield address
        finally:
            serving.cancel()
            ended = await asyncio.gather(serving, return_exceptions=True)
            assert isinstance(ended[0], asyncio.CancelledError), ended[0]
