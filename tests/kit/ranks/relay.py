"""A TCP relay on loopback between two processes. A test can cut the relay's connections."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from lockstep.ranks.protocol.host_port import split_address
from tests.kit.loop_thread import LoopThread

PATIENCE_S = 30.0
"""Seconds to wait until all connections are cut."""


class Relay:
    """Forwards each accepted connection to the address `target`.

    `cuts[n]` is the number of bytes after which the relay cuts connection n. The bytes of both
    directions count. Connections without an entry in `cuts` have no such limit.
    """

    def __init__(self, target: str, cuts: Sequence[int] = ()) -> None:
        self.connections = 0
        """Number of connections that the relay has accepted and forwarded."""
        self._target = target
        self._cuts = list(cuts)
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._forwarding = set[asyncio.Task[None]]()
        self._loop = LoopThread("relay")
        self.address = f"127.0.0.1:{self._loop.listen(self._accept, '127.0.0.1', 0)}"

    def cut(self) -> None:
        self._loop.start(self._cut_all()).result(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.close()

    async def _cut_all(self) -> None:
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        self._pairs.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding = asyncio.create_task(self._forward(reader, writer))
        self._forwarding.add(forwarding)
        forwarding.add_done_callback(self._forwarding.discard)
        forwarding.add_done_callback(lambda _: writer.transport.abort())

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = [self._cuts.pop(0)] if self._cuts else [1 << 60]
        self.connections += 1
        host, port = split_address(self._target)
        try:
            their_reader, their_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        self._pairs.append((writer, their_writer))
        both = (
            asyncio.create_task(_pump(reader, their_writer, left)),
            asyncio.create_task(_pump(their_reader, writer, left)),
        )
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Abort both connections before the first await, because a second cancellation of this task
            # may interrupt that await.
            for each in (writer, their_writer):
                each.transport.abort()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]
) -> None:
    """Forward data until the sender closes or `left[0]` more bytes are forwarded."""
    while data := await reader.read(min(left[0], 1 << 14)):
        writer.write(data)
        await writer.drain()
        left[0] -= len(data)
        if left[0] <= 0:
            return
