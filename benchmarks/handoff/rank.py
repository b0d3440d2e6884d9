"""One process of the handoff benchmark: rank 0 serves its pages, rank 1 reads them."""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import sha256
from queue import SimpleQueue
from typing import Final

import torch.distributed as dist

from ...errors import StorageError
from ...page_format.page_layout import Column, PageLayout, ShardPlace
from ...ranks.executor.pools import HostPool
from ...ranks.executor.storage_transfers import RankObjects
from ...ranks.executor.writers import EVERYTHING
from ...ranks.page_server.page_server import HostPageServer
from ...ranks.protocol.orders import KV_POOL, ObjectTransfer
from ...storage_backends.base import Read, ReadOutcome
from ...storage_backends.peer.backend import PeerBackend
from ...storage_backends.peer.transfer_engine import TransferEngine
from ...storage_backends.records.shardings import Shardings
from ..rank_processes import RankProcess, Say
from .handoff_settings import HandoffSettings, Turn, TurnTimes

_NAMESPACE: Final = "ab" * 32
_NOISE_BYTES: Final = 1 << 20
_CALL_BYTES: Final = 16 << 20
_CALLS: Final = 2
"""The number of storage calls in flight at a time, as many as a rank of a group would have. Each call
moves `_CALL_BYTES`."""
_TIMEOUT_S: Final = 120.0
_PLACES: Final = "places"
_SECRET: Final = "of this measurement"  # noqa: S105 - both processes are on this machine.


def measure(settings: HandoffSettings, member: RankProcess, say: Say) -> TurnTimes:
    """Run the measurement as one of the two processes."""
    objects = _objects(settings)
    if member.rank == 0:
        return _serve(settings, member, objects)
    return asyncio.run(_read(settings, member, objects, say))


def _objects(settings: HandoffSettings) -> RankObjects:
    """Return one rank's host pages, as many as a round moves, identical in both processes."""
    column = Column(name="kv", layers=1, heads=1, elements=settings.page_bytes, dtype="uint8")
    layouts = {KV_POOL: PageLayout(page_tokens=1, columns=(column,))}
    pool = HostPool(layouts[KV_POOL].shard(0, 1), settings.pages, pinned=False)
    noise = random.Random(0).randbytes(_NOISE_BYTES)
    for at in range(0, len(pool.memory), _NOISE_BYTES):
        some = pool.memory[at : at + _NOISE_BYTES]
        some[:] = noise[: len(some)]
    for number, page in enumerate(pool.page_views(range(settings.pages))):
        mark = number.to_bytes(8, "little")[: len(page)]
        page[: len(mark)] = mark
    return RankObjects(
        pools={KV_POOL: pool},
        namespace=_NAMESPACE,
        writer=EVERYTHING,
        shardings=Shardings(ShardPlace.of(0, 1), layouts, _NAMESPACE),
    )


def _engine(settings: HandoffSettings, host: str) -> TransferEngine | None:
    engine = settings.engine
    return None if engine is None else TransferEngine(engine.protocol, engine.device, host)


def _keys(settings: HandoffSettings, number: int) -> tuple[bytes, ...]:
    """Return the page keys of round `number`, which differ from those of other rounds."""
    return tuple(sha256(b"%d %d" % (number, page)).digest() for page in range(settings.pages))


def _serve(settings: HandoffSettings, member: RankProcess, objects: RankObjects) -> TurnTimes:
    """In each round, send all pages over a bare connection, then serve them as objects."""
    turns = TurnTimes([], [], [])
    servers = [HostPageServer(objects, make_engine=partial(_engine, settings))]
    if settings.authenticates:
        servers.append(HostPageServer(objects, secret=_SECRET))
    for server in servers:
        server.open([server.rank])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        places = [f"127.0.0.1:{listening.getsockname()[1]}", *(each.address for each in servers)]
        (member.folder / _PLACES).write_text(" ".join(places), encoding="ascii")
        dist.barrier()
        connection, _ = listening.accept()
    pages = objects.page_views(KV_POOL, range(settings.pages))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(settings.rounds):
            dist.barrier()
            cpu = time.process_time()
            for page in pages:
                connection.sendall(page)
            dist.barrier()
            turns.limit.append(Turn(0.0, time.process_time() - cpu))
            for server, taken in zip(servers, (turns.handoff, turns.authenticated), strict=False):
                taken.append(_serve_once(settings, number, server))
    for server in servers:
        server.close()
    return turns


def _serve_once(settings: HandoffSettings, number: int, server: HostPageServer) -> Turn:
    """Serve all pages while the other process reads them; return this process's CPU time."""
    keys, slots = _keys(settings, number), tuple(range(settings.pages))
    server.serve(number, [ObjectTransfer(KV_POOL, keys, slots)])
    dist.barrier()
    cpu = time.process_time()
    dist.barrier()
    turn = Turn(0.0, time.process_time() - cpu)
    quiet = SimpleQueue[int]()
    server.withdraw(number, quiet.put)
    quiet.get(timeout=_TIMEOUT_S)
    return turn


async def _read(
    settings: HandoffSettings, member: RankProcess, objects: RankObjects, say: Say
) -> TurnTimes:
    """In each round, receive all pages over a bare connection, then read them as objects."""
    turns = TurnTimes([], [], [])
    dist.barrier()
    bare, *served = (member.folder / _PLACES).read_text(encoding="ascii").split()
    pages = objects.page_views(KV_POOL, range(settings.pages))
    expected = [bytes(page) for page in pages] if settings.page_bytes <= _CALL_BYTES else []
    backends = [PeerBackend(served[0], engine=settings.engine)]
    backends += [PeerBackend(each, _SECRET) for each in served[1:]]
    for backend in backends:
        await backend.open(objects.memory())
    host, _, port = bare.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        for number in range(settings.rounds):
            say(f"round {number + 1} of {settings.rounds}")
            turns.limit.append(await _turn(_receiving(connection, pages)))
            names = objects.names(KV_POOL, _keys(settings, number))
            shape = objects.shape(KV_POOL)
            reads = [Read(name, (page,), shape) for name, page in zip(names, pages, strict=True)]
            for backend, taken in zip(backends, (turns.handoff, turns.authenticated), strict=False):
                for page in pages:
                    page[-8:] = bytes(len(page[-8:]))
                taken.append(await _turn(_reading(backend, reads, settings.page_bytes)))
                if any(bytes(page) != was for page, was in zip(pages, expected, strict=False)):
                    raise StorageError("a page arrived with wrong bytes")
    for backend in backends:
        await backend.close()
    return turns


async def _turn(move: Callable[[], Awaitable[None]]) -> Turn:
    """Run `move` once between two barriers; return its duration and this process's CPU time."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    await move()
    turn = Turn(time.perf_counter() - wall, time.process_time() - cpu)
    dist.barrier()
    return turn


def _receiving(
    connection: socket.socket, pages: Sequence[memoryview]
) -> Callable[[], Awaitable[None]]:
    async def receive() -> None:
        for page in pages:
            at = 0
            while at < len(page):
                at += connection.recv_into(page[at:])

    return receive


def _reading(
    backend: PeerBackend, reads: Sequence[Read], page_bytes: int
) -> Callable[[], Awaitable[None]]:
    step = max(1, _CALL_BYTES // page_bytes)

    async def read() -> None:
        starts = iter(range(0, len(reads), step))

        async def some() -> None:
            for start in starts:
                deadline = time.monotonic() + _TIMEOUT_S
                outcomes = await backend.read(reads[start : start + step], deadline=deadline)
                if set(outcomes) != {ReadOutcome.OK}:
                    raise StorageError(f"reads returned {set(outcomes)}, must all be OK")

        await asyncio.gather(*(some() for _ in range(_CALLS)))

    return read
