"""Building blocks for executor tests: layouts, pages with content, and a store that can block calls."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from queue import SimpleQueue

import torch

from lockstep.coordinator.ballot import Progress
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.page_layout import (
    Column,
    PageLayout,
    ShardLayout,
    ShardPlace,
)
from lockstep.ranks.executor.base import Executor
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.pools import DevicePool, HostPool, TierPools
from lockstep.ranks.executor.stores import StoreAccess
from lockstep.ranks.executor.writers import EVERYTHING, WriterShare
from lockstep.ranks.protocol.orders import (
    KV_POOL,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    Direction,
    ObjectTransfer,
    Order,
)
from lockstep.storage_backends.base import (
    Read,
    ReadOutcome,
    StorageBackend,
    Write,
    WriteOutcome,
)
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.records.shardings import Shardings
from lockstep.storage_backends.wrappers.base import Call

NAMESPACE = "ab" * 32
PATIENCE_S = 30.0
"""Seconds to wait for progress. Only a failing test waits this long."""
LONG_S = 600.0
"""Seconds from an order to its deadline, for orders that must finish well before."""


def grouped_layout(world_size: int = 2, rank: int = 1) -> ShardLayout:
    """Return one rank's layout for grouped-query attention, with keys and values sharded by heads."""
    columns = tuple(Column(name=name, layers=3, heads=4, elements=16) for name in ("k", "v"))
    return PageLayout(page_tokens=8, columns=columns).shard(rank, world_size)


def mixed_layout() -> ShardLayout:
    """Return a layout with columns of all element types, replicated and sharded, of odd sizes."""
    columns = (
        Column(name="k8", layers=3, heads=2, elements=5, dtype="float8_e4m3fn"),
        Column(name="flags", layers=1, heads=1, elements=3, dtype="uint8", replicated=True),
        Column(name="v", layers=2, heads=4, elements=7, dtype="float16"),
        Column(name="scales", layers=3, heads=2, elements=1, dtype="float32"),
        Column(name="index", layers=3, heads=1, elements=9, dtype="int8", replicated=True),
        Column(name="draft", layers=1, heads=2, elements=4, dtype="bfloat16"),
    )
    return PageLayout(page_tokens=3, columns=columns).shard(0, 2)


def latent_layout(rank: int = 3) -> ShardLayout:
    """Return a layout with replicated columns only, as in a model with latent attention."""
    columns = (
        Column(name="latent", layers=4, heads=1, elements=72, replicated=True),
        Column(name="index", layers=4, heads=1, elements=132, dtype="uint8", replicated=True),
    )
    return PageLayout(page_tokens=16, columns=columns).shard(rank, 4)


def plain_pages(page_bytes: int, heads: int = 1) -> PageLayout:
    """Return a layout with one uint8 column, for tests in which only the page size matters."""
    column = Column(name="kv", layers=1, heads=heads, elements=page_bytes // heads, dtype="uint8")
    return PageLayout(page_tokens=1, columns=(column,))


def plain_layout(page_bytes: int) -> ShardLayout:
    return plain_pages(page_bytes).shard(0, 1)


def window_layout() -> ShardLayout:
    """Return a layout of sliding-window layers that can be combined with `grouped_layout`."""
    columns = tuple(Column(name=name, layers=5, heads=4, elements=16) for name in ("k", "v"))
    return PageLayout(page_tokens=8, columns=columns).shard(1, 2)


def state_layout() -> ShardLayout:
    """Return a layout of a recurrent state, with two columns of different element types."""
    columns = (
        Column(name="ssm", layers=6, heads=4, elements=40, dtype="float32"),
        Column(name="conv", layers=6, heads=4, elements=9),
    )
    return PageLayout(page_tokens=1, columns=columns).shard(1, 2)


LAYOUTS = {"grouped": grouped_layout(), "mixed": mixed_layout(), "latent": latent_layout()}
COMPONENTS = {"window": window_layout(), "state": state_layout()}
"""The pools of a hybrid model, except that of full attention."""


def make_executor(
    layout: ShardLayout,
    *,
    components: Mapping[str, ShardLayout] | None = None,
    backend: StorageBackend | None = None,
    writer: WriterShare = EVERYTHING,
    shardings: Shardings | None = None,
    device: str = "cpu",
    device_pages: int = 8,
    host_pages: int = 8,
    inflight_bytes: int = 64 << 20,
    close_timeout_s: float = PATIENCE_S,
) -> RankExecutor:
    """Make an executor with a KV pool and the pools of `components`; open the store if one is given.

    The caller must close the executor.
    """
    pools = {
        name: TierPools(
            DevicePool(shard, device_pages, torch.device(device)),
            HostPool(shard, host_pages, pinned=device != "cpu"),
        )
        for name, shard in ({KV_POOL: layout} | dict(components or {})).items()
    }
    executor = RankExecutor(pools, inflight_bytes=inflight_bytes, close_timeout_s=close_timeout_s)
    if backend is not None:
        access = StoreAccess(
            kind="memory",
            make_backend=lambda: backend,
            namespace=NAMESPACE,
            writer=writer,
            shardings=shardings or Shardings(ShardPlace.of(0, 1), {}, NAMESPACE),
        )
        executor.open_store(access)
    return executor


def happened(
    executor: RankExecutor, orders: Iterable[Order], enough: Callable[[list[Progress]], bool]
) -> list[Progress]:
    """Send orders and start all copies; return the progress as soon as `enough(progress)` is true."""
    executor.carry_out(list(orders))
    for direction in Direction:
        executor.begin_copies(direction)
    return waited(executor, enough)


def waited(executor: RankExecutor, enough: Callable[[list[Progress]], bool]) -> list[Progress]:
    """Collect the executor's progress; return the progress as soon as `enough(progress)` is true."""
    progress = executor.progress()
    deadline = time.monotonic() + PATIENCE_S
    while not enough(progress):
        assert time.monotonic() < deadline, f"only this has happened: {progress}"
        executor.wait(deadline - time.monotonic())
        progress += executor.progress()
    return progress


def includes(*expected: Progress) -> Callable[[list[Progress]], bool]:
    """Return a predicate that checks that a list of progress contains all of `expected`."""
    return lambda progress: all(each in progress for each in expected)


def key_outcomes(executor: Executor, call: Call) -> Counter[str]:
    """Count keys by outcome for one kind of storage call, from `CallMetrics.outcomes`."""
    counted: Counter[str] = Counter()
    for calls in executor.counts().calls.values():
        counted.update(calls[call].outcomes)
    return counted


def bytes_read(executor: Executor) -> int:
    return sum(calls[Call.READ].nbytes for calls in executor.counts().calls.values())


def to_host(operation: int, device: Sequence[int], host: Sequence[int]) -> CopyToHost:
    return CopyToHost(operation, (CopyTransfer(KV_POOL, tuple(device), tuple(host)),), LONG_S)


def to_device(operation: int, host: Sequence[int], device: Sequence[int]) -> CopyToDevice:
    return CopyToDevice(operation, (CopyTransfer(KV_POOL, tuple(host), tuple(device)),), LONG_S)


def objects(count: int, *, first_key: int = 0, first_page: int = 0) -> tuple[ObjectTransfer, ...]:
    """Return a transfer of `count` consecutive keys and consecutive host pages in the KV pool."""
    pages = tuple(range(first_page, first_page + count))
    return (ObjectTransfer(KV_POOL, keys(count, first_key), pages),)


def hashed_objects(count: int) -> tuple[ObjectTransfer, ...]:
    """Return a transfer of `count` hashed keys and the first host pages of the KV pool."""
    return (ObjectTransfer(KV_POOL, hashed_keys(count), tuple(range(count))),)


def keys(count: int, first: int = 0) -> tuple[bytes, ...]:
    return tuple(index.to_bytes(32, "big") for index in range(first, first + count))


def hashed_keys(count: int) -> tuple[bytes, ...]:
    """Return page keys that are hashes, like the keys of real pages."""
    return tuple(sha256(key).digest() for key in keys(count))


def random_bytes(shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)


def fill_device(pool: DevicePool, seed: int) -> None:
    for number, shard in enumerate(pool.layout.columns):
        content = pool.column_bytes(shard)
        content.copy_(random_bytes(content.shape, seed * 1000 + number))


def fill_host(pool: HostPool, seed: int) -> list[bytes]:
    """Fill every page of a host pool with random content, and return the pages."""
    pool.bytes_tensor.copy_(random_bytes(pool.bytes_tensor.shape, seed))
    return [bytes(pool.page(slot)) for slot in range(pool.pages)]


def device_page(pool: DevicePool, page: int) -> bytes:
    """Return the bytes of a device page in the order of `page_layout`, copied column by column."""
    shards = pool.layout.columns
    required = [shard for shard in shards if not shard.column.optional]
    groups = [[shard] for shard in required if shard.column.replicated]
    groups.append([shard for shard in required if not shard.column.replicated])
    groups += [[shard] for shard in shards if shard.column.optional]
    parts: list[torch.Tensor] = []
    for group in groups:
        for unit in range(group[0].units if group else 0):
            for shard in group:
                heads = shard.heads // shard.units
                column = pool.column(shard.column.name)
                parts.append(column[:, page, unit * heads : (unit + 1) * heads])
    return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


class HeldStore(MemoryBackend):
    """An in-memory store whose calls block at chosen keys until the test releases them.

    When a read or write starts, its keys are put into the queue `entered`. If `stubborn` is true, a
    blocked call ignores cancellation until it is released, like a client library that cannot abort.
    """

    def __init__(self, *, stubborn: bool = False, shelf: Shelf | None = None) -> None:
        super().__init__(shelf)
        self.stubborn = stubborn
        self.entered: SimpleQueue[tuple[str, ...]] = SimpleQueue()
        self.exists_calls = 0
        self.queried_names: list[ObjectName] = []
        """The object names passed to `exists`, in order."""
        self.bytes_running = 0
        self.bytes_running_max = 0
        self.closed = threading.Event()
        self._gates: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def hold(self, *held: bytes) -> None:
        """From now on, block every call that contains one of these keys."""
        for key in held:
            self._gates[key.hex()] = asyncio.Event()

    def let_go(self, *held: bytes) -> None:
        """Release the calls blocked at these keys, or at any key if none are given."""
        assert self._loop is not None
        for key in held or [bytes.fromhex(gate) for gate in self._gates]:
            self._loop.call_soon_threadsafe(self._gates[key.hex()].set)

    def next_entered(self) -> tuple[str, ...]:
        """Wait until the next read or write has started; return its keys."""
        return self.entered.get(timeout=PATIENCE_S)

    def forget_entered(self) -> None:
        while not self.entered.empty():
            self.entered.get()

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        await super().open(memory)

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        self.exists_calls += 1
        self.queried_names += names
        await self._pass(names)
        return await super().exists(names, deadline=deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        await self._carry(reads)
        return await super().read(reads, deadline=deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        await self._carry(writes)
        return await super().write(writes, deadline=deadline)

    async def close(self) -> None:
        await super().close()
        self.closed.set()

    async def _carry(self, items: Sequence[Read] | Sequence[Write]) -> None:
        names = [item.name for item in items]
        nbytes = sum(item.shape.nbytes for item in items)
        self.bytes_running += nbytes
        self.bytes_running_max = max(self.bytes_running_max, self.bytes_running)
        self.entered.put(tuple(name.key for name in names))
        try:
            await self._pass(names)
        finally:
            self.bytes_running -= nbytes

    async def _pass(self, names: Sequence[ObjectName]) -> None:
        cancelled: asyncio.CancelledError | None = None
        for gate in [self._gates[name.key] for name in names if name.key in self._gates]:
            while not gate.is_set():
                try:
                    await gate.wait()
                except asyncio.CancelledError as error:
                    if not self.stubborn:
                        raise
                    cancelled = error
        if cancelled is not None:
            raise cancelled
