"""A writable store for the contract tests of `peer://`: its objects are host pages that ranks serve.

A write copies the page into the host memory of a real rank and publishes it. A removal withdraws the
page. A read uses the `peer://` backend under test.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from lockstep.page_format.object_name import ObjectName, name_digest
from lockstep.page_format.object_shape import ObjectShape
from lockstep.page_format.page_layout import ShardLayout, ShardPlace
from lockstep.ranks.executor.storage_transfers import RankObjects
from lockstep.ranks.page_server.page_server import HostPageServer
from lockstep.ranks.protocol.orders import ObjectTransfer
from lockstep.storage_backends.base import (
    Capabilities,
    Read,
    ReadOutcome,
    StoredObject,
    Write,
    WriteOutcome,
)
from lockstep.storage_backends.buffers import fitting
from lockstep.storage_backends.peer.backend import PeerBackend
from lockstep.storage_backends.records.shardings import Shardings
from tests.kit.ranks.page_servers import (
    BY_ENGINE,
    LONG_BOUNDS,
    engine_over_tcp,
    in_host_memory,
    no_engine,
)
from tests.kit.storage.calls import HEALTHY_S, object_name, using

PAGES = 700
"""Number of host pages of a rank, enough for the contract's large batch. Unwritten pages cost no
memory."""

Kind = tuple[str, str, str, ObjectShape]
"""The kind of a page: namespace, pool, shard and shape. All pages of one host pool have the same kind.
"""


@dataclass(eq=False)
class HostOfKind:
    """A rank that serves the pages of one host pool. All of these pages have the same `Kind`."""

    objects: RankObjects
    server: HostPageServer
    slots: dict[ObjectName, int] = field(default_factory=dict[ObjectName, int])
    used: int = 0

    @staticmethod
    def of(kind: Kind, *, by_engine: bool) -> "HostOfKind":
        namespace, pool, shard, shape = kind
        layout = ShardLayout(
            page_tokens=1,
            columns=(),
            page_bytes=shape.nbytes,
            name=shard,
            replicated=False,
            shape=shape,
        )
        shardings = Shardings(ShardPlace.of(0, 1), {}, namespace)
        objects = in_host_memory({pool: layout}, shardings, pages=PAGES, namespace=namespace)
        make_engine = engine_over_tcp if by_engine else no_engine
        server = HostPageServer(objects, bounds=LONG_BOUNDS, make_engine=make_engine)
        server.open([server.rank])
        return HostOfKind(objects, server)

    def put(self, name: ObjectName, content: bytes) -> None:
        slot = self.slots[name] = self.used
        self.used += 1
        self.page(name)[:] = content
        transfer = ObjectTransfer(name.pool, (bytes.fromhex(name.key),), (slot,))
        self.server.serve(slot, [transfer])

    async def withdraw(self, name: ObjectName) -> None:
        quiet = SimpleQueue[int]()
        self.server.withdraw(self.slots.pop(name), quiet.put)
        await asyncio.to_thread(quiet.get, timeout=HEALTHY_S)

    def page(self, name: ObjectName) -> memoryview:
        (view,) = self.objects.page_views(name.pool, [self.slots[name]])
        return view


class FedStore:
    """A writable test store that keeps its pages on ranks: one rank for each `Kind` of page."""

    def __init__(self, *, by_engine: bool = False) -> None:
        """If `by_engine` is True, all reads use transfer engines over TCP."""
        self._by_engine = by_engine
        self.hosts: dict[Kind, HostOfKind] = {}
        self.of_name: dict[ObjectName, HostOfKind] = {}
        self.first = self.host_of(object_name(0), ObjectShape.whole(1))

    def backend(self) -> "FedBackend":
        return FedBackend(self)

    def reader(self, host: HostOfKind) -> PeerBackend:
        return PeerBackend(host.server.address, engine=BY_ENGINE if self._by_engine else None)

    def host_of(self, name: ObjectName, shape: ObjectShape) -> HostOfKind:
        """Return the rank that holds pages of this kind; start the rank if there is none."""
        whole = shape.of_columns(shape.present)
        kind = (name.namespace, name.pool, name.shard, whole)
        if kind not in self.hosts:
            self.hosts[kind] = HostOfKind.of(kind, by_engine=self._by_engine)
        return self.hosts[kind]

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        self.of_name[name].page(name)[at] ^= 1

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        """Serve a wrong page for the object `other`: the page of `name`, whose header says `name`."""
        host = self.of_name[other] = self.of_name[name]
        pages = host.server.offers.pages
        pages[other.pool, other.key] = pages[name.pool, name.key]

    def close(self) -> None:
        for host in self.hosts.values():
            host.server.close()


class FedBackend:
    """A backend that uses `peer://` to read each object from the rank that serves it."""

    def __init__(self, store: FedStore) -> None:
        self._store = store
        self._readers: dict[int, PeerBackend] = {}
        self._is_open = False
        self._first = store.reader(store.first)

    @property
    def capabilities(self) -> Capabilities:
        return self._first.capabilities

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        await self._first.open(memory)
        self._readers[id(self._store.first)] = self._first
        self._is_open = True

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        there = [False] * len(names)
        for reader, positions in await self._sorted(names):
            some = [names[at] for at in positions]
            for at, answer in zip(
                positions, await reader.exists(some, deadline=deadline), strict=True
            ):
                there[at] = answer
        return there

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        outcomes = [ReadOutcome.FAILED] * len(reads)
        for reader, positions in await self._sorted([read.name for read in reads]):
            some = [reads[at] for at in positions]
            for at, outcome in zip(
                positions, await reader.read(some, deadline=deadline), strict=True
            ):
                outcomes[at] = outcome
        return outcomes

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        return [await self._write(each, deadline) for each in writes]

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        if not self._is_open:
            return [False] * len(names)
        for name in names:
            host = self._store.of_name.pop(name, None)
            if host is not None:
                await host.withdraw(name)
        return [name_digest(name) is not None for name in names]

    def objects(self) -> AsyncIterator[StoredObject]:
        return self._first.objects()

    async def close(self) -> None:
        self._is_open = False
        for reader in self._readers.values():
            await reader.close()

    async def _sorted(self, names: Sequence[ObjectName]) -> list[tuple[PeerBackend, list[int]]]:
        """Return the `peer://` backends for these objects, each with the positions of its objects."""
        positions: dict[int, list[int]] = {}
        for at, name in enumerate(names):
            host = self._store.of_name.get(name, self._store.first)
            if id(host) not in self._readers and self._is_open:
                reader = self._readers[id(host)] = self._store.reader(host)
                await reader.open()
            positions.setdefault(id(host), []).append(at)
        return [(self._readers.get(host, self._first), some) for host, some in positions.items()]

    async def _write(self, write: Write, deadline: float) -> WriteOutcome:
        name = write.name
        if name_digest(name) is None or not self._is_open:
            return WriteOutcome.FAILED
        if time.monotonic() >= deadline:
            return WriteOutcome.TIMED_OUT
        buffers = fitting(write.buffers, write.shape.nbytes)
        if buffers is None:
            return WriteOutcome.FAILED
        if name in self._store.of_name:
            return WriteOutcome.PRESENT
        host = self._store.of_name[name] = self._store.host_of(name, write.shape)
        host.put(name, b"".join(buffers))
        await read_once(host, name, write.shape)
        return WriteOutcome.OK


async def read_once(host: HostOfKind, name: ObjectName, shape: ObjectShape) -> None:
    """Read an object once, so that the server computes its checksums before the test alters it."""
    async with using(PeerBackend(host.server.address)) as reader:
        whole = shape.of_columns(shape.present)
        buffer = memoryview(bytearray(whole.nbytes))
        deadline = time.monotonic() + HEALTHY_S
        assert await reader.read([Read(name, (buffer,), whole)], deadline=deadline) == [
            ReadOutcome.OK
        ]
