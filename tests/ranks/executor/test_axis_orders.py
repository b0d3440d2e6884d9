"""Engines that order the axes of their tensors differently share pages: a page has one form."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch

from lockstep.coordinator.ballot import Ended, Landed
from lockstep.page_format.page_layout import Column, PageLayout, ShardPlace
from lockstep.ranks.executor.engine_pages import AxisOrder, EnginePages
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.pools import HostPool, TierPools
from lockstep.ranks.executor.stores import StoreAccess
from lockstep.ranks.executor.writers import EVERYTHING
from lockstep.ranks.protocol.orders import (
    KV_POOL,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    Fetch,
    ObjectTransfer,
    Put,
)
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.records.shardings import Shardings
from tests.kit.devices import DEVICES
from tests.kit.ranks.executor_parts import (
    LONG_S,
    NAMESPACE,
    PATIENCE_S,
    happened,
    includes,
    keys,
)

BLOCKS, TOKENS = 9, 4
COLUMNS = (
    Column(name="index", layers=2, heads=1, elements=3, dtype="uint8", replicated=True),
    Column(name="k", layers=2, heads=4, elements=5, dtype="float32"),
    Column(name="v", layers=3, heads=6, elements=2, dtype="float32"),
)
"""Two units of two heads of one column and three of the other, and a part that is in no unit."""
LAYOUT = PageLayout(page_tokens=TOKENS, columns=COLUMNS).shard(0, 1)

Tensors = Mapping[str, Sequence[torch.Tensor]]
ORDERS: dict[str, tuple[AxisOrder, Callable[[torch.Tensor], torch.Tensor]]] = {
    "heads first": (AxisOrder.HEADS_FIRST, torch.clone),
    "tokens first": (AxisOrder.TOKENS_FIRST, lambda each: each.transpose(1, 2).contiguous()),
    "tokens first in memory": (
        AxisOrder.HEADS_FIRST,
        lambda each: each.transpose(1, 2).contiguous().transpose(1, 2),
    ),
}
"""The order that tensors name, and how they come from tensors with heads first."""


def content(seed: int, device: str = "cpu") -> Tensors:
    """Random KV, heads first."""
    torch.manual_seed(seed)
    made = {
        each.name: [
            torch.randint(0, 256, (BLOCKS, each.heads, TOKENS, each.elements), dtype=torch.uint8)
            if each.dtype == "uint8"
            else torch.rand(BLOCKS, each.heads, TOKENS, each.elements)
            for _ in range(each.layers)
        ]
        for each in COLUMNS
    }
    return {name: [each.to(device) for each in layers] for name, layers in made.items()}


def arranged(tensors: Tensors, order: str) -> Tensors:
    arrange = ORDERS[order][1]
    return {name: [arrange(each) for each in layers] for name, layers in tensors.items()}


@pytest.fixture
def start() -> Iterator[Callable[[Tensors, str, Shelf], RankExecutor]]:
    """Make executors over an engine's tensors and a store; they are closed at the end."""
    started: list[RankExecutor] = []

    def make(tensors: Tensors, order: str, shelf: Shelf) -> RankExecutor:
        pages = EnginePages(LAYOUT, tensors, ORDERS[order][0])
        pinned = pages.device.type == "cuda"
        pools = {KV_POOL: TierPools(pages, HostPool(LAYOUT, BLOCKS, pinned=pinned))}
        executor = RankExecutor(pools, close_timeout_s=PATIENCE_S)
        started.append(executor)
        executor.open_store(
            StoreAccess(
                kind="memory",
                make_backend=lambda: MemoryBackend(shelf),
                namespace=NAMESPACE,
                writer=EVERYTHING,
                shardings=Shardings(ShardPlace.of(0, 1), {}, NAMESPACE),
            )
        )
        return executor

    yield make
    for executor in started:
        executor.close()


def objects(pages: tuple[int, ...]) -> tuple[ObjectTransfer]:
    return (ObjectTransfer(KV_POOL, keys(len(pages)), pages),)


def write(executor: RankExecutor, blocks: tuple[int, ...], pages: tuple[int, ...]) -> None:
    copy = CopyToHost(1, (CopyTransfer(KV_POOL, blocks, pages),), LONG_S)
    happened(executor, [copy], includes(Ended(1, ok=True)))
    happened(executor, [Put(2, objects(pages), LONG_S)], includes(Ended(2, ok=True)))


def read(executor: RankExecutor, pages: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    happened(executor, [Fetch(1, objects(pages), LONG_S)], includes(Landed(1, len(pages))))
    copy = CopyToDevice(2, (CopyTransfer(KV_POOL, pages, blocks),), LONG_S)
    happened(executor, [copy], includes(Ended(2, ok=True)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("written", ORDERS)
@pytest.mark.parametrize("wanted", ORDERS)
def test_what_one_engine_writes_another_reads_whatever_order_their_axes_have(
    start: Callable[[Tensors, str, Shelf], RankExecutor], written: str, wanted: str, device: str
) -> None:
    kv, shelf = content(1, device), Shelf()
    nothing = {name: [torch.zeros_like(each) for each in layers] for name, layers in kv.items()}
    reads = arranged(nothing, wanted)

    write(start(arranged(kv, written), written, shelf), (1, 2, 3, 8, 0), (4, 5, 6, 0, 8))
    read(start(reads, wanted, shelf), (2, 3, 4, 1, 7), (5, 6, 7, 1, 3))

    expected = arranged(kv, wanted)
    found = [
        torch.equal(each[[5, 6, 7, 1, 3]], wants[[1, 2, 3, 8, 0]]) and not each[[0, 2, 4, 8]].any()
        for name, layers in reads.items()
        for each, wants in zip(layers, expected[name], strict=True)
    ]
    assert len(found) == 7
    assert all(found)
