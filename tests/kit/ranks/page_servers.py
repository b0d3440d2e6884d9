"""Page servers that send host pages to readers of other groups, and a reader driven by the test."""

import asyncio
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.page_layout import PageLayout, ShardLayout, ShardPlace
from lockstep.ranks.executor.pools import HostPool
from lockstep.ranks.executor.storage_transfers import RankObjects
from lockstep.ranks.executor.writers import EVERYTHING
from lockstep.ranks.page_server.page_server import HostPageServer, ServerBounds
from lockstep.ranks.protocol.host_port import split_address
from lockstep.ranks.protocol.orders import KV_POOL, ObjectTransfer
from lockstep.ranks.protocol.transfer_engine_settings import TransferEngineSettings
from lockstep.storage_backends.base import Read
from lockstep.storage_backends.peer.handshake import greet_server
from lockstep.storage_backends.peer.transfer_engine import TransferEngine
from lockstep.storage_backends.peer.wire import (
    MESSAGES,
    PREFIX_BYTES,
    Message,
    ReadReply,
    State,
    decode_prefix,
    encode,
)
from lockstep.storage_backends.records.shardings import Shardings
from tests.kit.ranks.executor_parts import NAMESPACE, PATIENCE_S, hashed_keys
from tests.kit.ranks.reference_pages import reference_page
from tests.kit.servers.mooncake_master import needs_mooncake

LONG_BOUNDS = ServerBounds(quiet_s=PATIENCE_S, stall_s=PATIENCE_S, greeting_s=PATIENCE_S)
"""Server timeouts that no reader of a healthy test reaches."""


def objects_of(
    layout: PageLayout,
    place: ShardPlace,
    absent: Sequence[str] = (),
    *,
    pages: int,
    namespace: str = NAMESPACE,
) -> RankObjects:
    """Return one rank's host pages of full attention; their bytes are not set."""
    shard = layout.shard(place.tp_rank, place.tp_size, absent=absent)
    shardings = Shardings(place, {KV_POOL: layout}, namespace, absent)
    return in_host_memory({KV_POOL: shard}, shardings, pages=pages, namespace=namespace)


def in_host_memory(
    shards: Mapping[str, ShardLayout], shardings: Shardings, *, pages: int, namespace: str
) -> RankObjects:
    """Return one rank's host pages of the given pools; their bytes are not set."""
    pools = {name: HostPool(shard, pages, pinned=False) for name, shard in shards.items()}
    return RankObjects(pools=pools, namespace=namespace, writer=EVERYTHING, shardings=shardings)


def no_engine(_: str) -> None:
    """Return None in place of a transfer engine, so that pages are sent over the connection."""


class KeptEngine(TransferEngine):
    """A transfer engine that `close` keeps for the next test, because closing it takes a second."""

    def close(self) -> None:
        self.unregister(*self._registered.values())
        _kept.append(self)


_kept: list[KeptEngine] = []


def engine_over_tcp(host: str) -> TransferEngine:
    """Return a transfer engine over TCP; skip the test if Mooncake is not installed."""
    if _kept:
        return _kept.pop()
    needs_mooncake()
    return KeptEngine("tcp", "", host)


BY_ENGINE = TransferEngineSettings(insists=True)
"""Settings of a reader that must use the transfer engine. If it cannot, its reads fail."""


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """Page servers of all ranks of a group, each with its shard of the same reference pages."""

    servers: Sequence[HostPageServer]
    objects: Sequence[RankObjects]

    @property
    def uri(self) -> str:
        """Return the peer URI of rank 0, to which readers connect first."""
        return f"peer://{self.servers[0].address}"

    def serve(self, keys: Sequence[bytes], operation: int = 1) -> None:
        """Publish the first `len(keys)` host pages of every rank, one page under each key."""
        transfer = ObjectTransfer(KV_POOL, tuple(keys), tuple(range(len(keys))))
        for server in self.servers:
            server.serve(operation, [transfer])

    def withdrawn(self, operation: int = 1) -> "SimpleQueue[int]":
        """Withdraw the pages of `operation` on every rank; return a queue.

        Each rank puts the operation's id into the queue as soon as no read of the operation's pages is
        in flight.
        """
        quiet = SimpleQueue[int]()
        for server in self.servers:
            server.withdraw(operation, quiet.put)
        return quiet

    def close(self) -> None:
        for server in self.servers:
            assert server.close(PATIENCE_S)


@contextmanager
def serving(
    layout: PageLayout,
    tp_size: int = 1,
    absent: Sequence[str] = (),
    *,
    pages: int = 5,
    secret: str = "",
    bounds: ServerBounds = LONG_BOUNDS,
    ports: Sequence[int] | None = None,
    reached_at: str = "",
    by_engine: bool = False,
) -> Generator[ServedGroup]:
    """Run a group whose host pages have reference content. At first no page is published."""
    objects = [
        objects_of(layout, ShardPlace.of(rank, tp_size), absent, pages=pages)
        for rank in range(tp_size)
    ]
    for rank, each in enumerate(objects):
        for slot, view in enumerate(each.page_views(KV_POOL, range(pages))):
            view[:] = reference_page(layout, ShardPlace.of(rank, tp_size), absent, slot)
    servers = [
        HostPageServer(
            each,
            f"127.0.0.1:{port}",
            secret=secret,
            reached_at=reached_at,
            bounds=bounds,
            make_engine=engine_over_tcp if by_engine else no_engine,
        )
        for each, port in zip(objects, ports or [0] * tp_size, strict=True)
    ]
    for server in servers:
        server.open([each.rank for each in servers])
    group = ServedGroup(servers, objects)
    try:
        yield group
    finally:
        group.close()


@contextmanager
def serving_keys(count: int, layout: PageLayout, **options: Any) -> Generator[ServedGroup]:
    """Run a group with `count` pages, published under the first `count` hashed keys."""
    with serving(layout, pages=count, **options) as group:
        group.serve(hashed_keys(count))
        yield group


def reads_of(group: ServedGroup, count: int, fill: int = 0) -> tuple[list[Read], list[bytearray]]:
    """Return reads of rank 0's first `count` pages, and the buffers that the reads fill.

    Initially each byte of the buffers is `fill`.
    """
    layout = group.objects[0].pools[KV_POOL].layout
    buffers = [bytearray([fill]) * layout.page_bytes for _ in range(count)]
    names = [ObjectName(NAMESPACE, key.hex(), KV_POOL, layout.name) for key in hashed_keys(count)]
    return [
        Read(name, (memoryview(buffer),), layout.shape)
        for name, buffer in zip(names, buffers, strict=True)
    ], buffers


def pages_of(group: ServedGroup, count: int) -> list[bytes]:
    return [bytes(each) for each in group.objects[0].page_views(KV_POOL, range(count))]


class RawReader:
    """A client of a page server that sends and receives frames only when the test calls a method."""

    def __init__(self, address: str, secret: str = "") -> None:
        self.sock = socket.create_connection(split_address(address), timeout=PATIENCE_S)
        self._attached_bytes = 0
        self.sock.setblocking(False)
        try:
            self.tags = asyncio.run(greet_server(self.sock, secret.encode(), "raw", address))
        except BaseException:
            self.close()
            raise
        self.sock.settimeout(PATIENCE_S)

    def send(self, message: Message) -> None:
        frame = encode(message)
        self.sock.sendall(frame + self.tags.sent.of(frame))

    def receive(self) -> tuple[Message, bytes]:
        """Receive the next frame; return its message and its attached bytes."""
        return self.receive_control(), self.receive_attached()

    def receive_control(self) -> Message:
        """Receive the next frame's message, but not its attached bytes; see `receive_attached`."""
        raw = self._exactly(PREFIX_BYTES)
        control_bytes, attached_bytes = decode_prefix(memoryview(raw))
        self._attached_bytes = attached_bytes
        control = self._exactly(control_bytes)
        self.tags.received.require(raw + control, self._exactly(self.tags.received.nbytes))
        return MESSAGES.decode(memoryview(control))

    def receive_attached(self) -> bytes:
        """Receive and return the attached bytes of the frame whose message was received last."""
        attached = self._exactly(self._attached_bytes)
        if attached:
            self.tags.received.require(attached, self._exactly(self.tags.received.nbytes))
        return attached

    def receive_states(self, count: int) -> list[State]:
        """Receive read replies until they contain the states of `count` objects; return the states.

        The attached bytes are dropped.
        """
        states: list[State] = []
        while len(states) < count:
            message, _ = self.receive()
            assert isinstance(message, ReadReply)
            states += map(State, message.states)
        return states

    def is_hung_up_on(self) -> bool:
        """Return True when the server closes the connection. Raises TimeoutError if it stays open."""
        try:
            while self.sock.recv(1 << 20):
                pass
        except ConnectionResetError:
            return True
        return True

    def close(self) -> None:
        self.sock.close()

    def _exactly(self, count: int) -> bytes:
        got = bytearray()
        while len(got) < count:
            some = self.sock.recv(min(1 << 20, count - len(got)))
            assert some, "the server has hung up"
            got += some
        return bytes(got)


@contextmanager
def raw_reader(address: str, secret: str = "") -> Generator[RawReader]:
    """Connect a reader and complete the handshake.

    The server's hello is the first message that the reader receives.
    """
    reader = RawReader(address, secret)
    try:
        yield reader
    finally:
        reader.close()


Connect = Callable[[ServedGroup], RawReader]
"""Function that connects a reader to rank 0 of a group."""
