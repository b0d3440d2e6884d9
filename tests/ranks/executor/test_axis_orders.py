"""Engines with different axis orders share pages, because a page has one canonical form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

import pytest
import torch

from lockstep.coordinator.ballot import TransferEnded
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import AxisOrder, EnginePages
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.pools import HostPool, TierPools
from lockstep.ranks.protocol.orders import (
    KV_POOL,
)
from tests.kit.devices import DEVICES
from tests.kit.ranks.executor_parts import (
    PATIENCE_S,
    happened,
    includes,
    to_device,
    to_host,
)

BLOCKS, TOKENS = 9, 4
COLUMNS = (
    Column(name="index", layers=2, heads=1, elements=3, dtype="uint8", replicated=True),
    Column(name="k", layers=2, heads=4, elements=5, dtype="float32"),
    Column(name="v", layers=3, heads=6, elements=2, dtype="float32"),
)
"""Two columns split by heads, and one replicated column. A unit has two heads of `k` and three of `v`.
"""
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
"""Per engine: the axis order that it declares, and a function that makes its tensors from heads-first
tensors."""


def content(seed: int, device: str = "cpu") -> Tensors:
    """Return random KV, with heads first."""
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
def start() -> Iterator[Callable[[Tensors, str], RankExecutor]]:
    """Return a function that makes executors over an engine's tensors; they are closed at teardown."""
    with ExitStack() as end:

        def make(tensors: Tensors, order: str) -> RankExecutor:
            pages = EnginePages(LAYOUT, tensors, ORDERS[order][0])
            host = HostPool(LAYOUT, BLOCKS, pinned=pages.device.type == "cuda")
            pools = {KV_POOL: TierPools(pages, host)}
            return end.enter_context(closing(RankExecutor(pools, close_timeout_s=PATIENCE_S)))

        yield make


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("written", ORDERS)
@pytest.mark.parametrize("wanted", ORDERS)
def test_what_one_engine_writes_another_reads_whatever_order_their_axes_have(
    start: Callable[[Tensors, str], RankExecutor], written: str, wanted: str, device: str
) -> None:
    kv = content(1, device)
    nothing = {name: [torch.zeros_like(each) for each in layers] for name, layers in kv.items()}
    reads = arranged(nothing, wanted)

    writer, reader = start(arranged(kv, written), written), start(reads, wanted)
    happened(
        writer, [to_host(1, [1, 2, 3, 8, 0], [4, 5, 6, 0, 8])], includes(TransferEnded(1, ok=True))
    )
    reader.host_pool.bytes_tensor.copy_(writer.host_pool.bytes_tensor)
    happened(
        reader,
        [to_device(1, [4, 5, 6, 0, 8], [5, 6, 7, 1, 3])],
        includes(TransferEnded(1, ok=True)),
    )

    expected = arranged(kv, wanted)
    found = [
        torch.equal(each[[5, 6, 7, 1, 3]], wants[[1, 2, 3, 8, 0]]) and not each[[0, 2, 4, 8]].any()
        for name, layers in reads.items()
        for each, wants in zip(layers, expected[name], strict=True)
    ]
    assert len(found) == 7
    assert all(found)
