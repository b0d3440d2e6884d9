"""Copies between device and host move every byte of every layout, after the engine's kernels."""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch

from lockstep.coordinator.ballot import Quiesced, QuiesceExpired, TransferEnded
from lockstep.errors import InternalError
from lockstep.page_format.page_layout import (
    ShardLayout,
)
from lockstep.ranks.executor import cuda_copies
from lockstep.ranks.executor.copies import page_runs
from lockstep.ranks.executor.cuda_copies import MoveRows
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.gathering import gather, scatter, slab_pairs
from lockstep.ranks.executor.pools import DevicePool, HostPool, TierPools
from lockstep.ranks.protocol.orders import (
    KV_POOL,
    Cancel,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    Fork,
)
from tests.kit.devices import DEVICES
from tests.kit.ranks.executor_parts import (
    COMPONENTS,
    LAYOUTS,
    LONG_S,
    PATIENCE_S,
    device_page,
    fill_device,
    grouped_layout,
    happened,
    includes,
    mixed_layout,
    plain_layout,
    to_device,
    to_host,
    waited,
)
from tests.kit.ranks.reference_pages import LAYOUTS as REFERENCE_LAYOUTS
from tests.kit.ranks.reference_pages import head_bytes, place_of, reference_page

SOON_S = 0.02
PAGES = 48
ORDERS = {
    "ascending": list(range(PAGES)),
    "descending": list(reversed(range(PAGES))),
    "shuffled": random.Random(7).sample(range(PAGES), PAGES),
    "every third": list(range(0, PAGES, 3)),
    "one": [PAGES - 1],
}
UNITED = {
    "eight units": REFERENCE_LAYOUTS["optional"].shard(0, 1, absent=["flags"]),
    "four of eight units": REFERENCE_LAYOUTS["replicated between"].shard(1, 2),
    "one stage": REFERENCE_LAYOUTS["divided"].shard(2, 4, stages=2),
}
"""Layouts with several units per page. The units of a page follow each other, and a unit has all
columns of its heads."""
KERNEL_CYCLES = 200_000_000
"""Cycles for which a kernel sleeps, about 0.1 s. A copy that does not wait for the kernel reads wrong
bytes."""

# The casts add types that torch's annotations lack. `_sleep` is private, but torch's own tests use it.
new_stream = cast("Callable[[], torch.cuda.Stream]", torch.cuda.Stream)
new_event = cast("Callable[[], torch.cuda.Event]", torch.cuda.Event)
sleep_on_the_device = cast(
    "Callable[[int], None]",
    torch.cuda._sleep,  # pyright: ignore[reportPrivateUsage]
)

Start = Callable[..., RankExecutor]


@pytest.fixture
def start(made: Start) -> Start:
    def make(
        layout: ShardLayout,
        device: str,
        pages: int = PAGES,
        components: Mapping[str, ShardLayout] | None = None,
    ) -> RankExecutor:
        return made(
            layout, components=components, device=device, device_pages=pages, host_pages=pages
        )

    return make


class HeldTransfers(tuple[CopyTransfer, ...]):
    """Transfers that the copying thread cannot begin until the test opens their gate."""

    __slots__ = ()
    gates: dict[int, threading.Event] = {}  # noqa: RUF012 - a tuple has no attributes of its own.

    def __iter__(self) -> Iterator[CopyTransfer]:
        assert self.gates[id(self)].wait(PATIENCE_S)
        return super().__iter__()


@pytest.fixture
def held() -> Iterator[Callable[..., HeldTransfers]]:
    """Return a function that makes held transfers; all gates open at teardown."""

    def make(*transfers: CopyTransfer) -> HeldTransfers:
        made = HeldTransfers(transfers)
        HeldTransfers.gates[id(made)] = threading.Event()
        return made

    yield make
    for gate in HeldTransfers.gates.values():
        gate.set()
    HeldTransfers.gates.clear()


def let_go(transfers: HeldTransfers) -> None:
    HeldTransfers.gates[id(transfers)].set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS | UNITED)
def test_pages_keep_every_byte_on_their_way_to_the_host_and_back(
    start: Start, layout: str, order: str, device: str
) -> None:
    there_and_back(start((LAYOUTS | UNITED)[layout], device), ORDERS[order])


def there_and_back(executor: RankExecutor, pages: list[int]) -> None:
    """Copy pages to the host, and back to other positions; compare all bytes."""
    pool = executor.device_pool
    fill_device(pool, seed=1)
    slots = random.Random(11).sample(range(PAGES), len(pages))
    before = [device_page(pool, page) for page in range(PAGES)]

    happened(executor, [to_host(1, pages, slots)], includes(TransferEnded(1, ok=True)))

    on_host = [bytes(executor.host_pool.page(slot)) for slot in slots]
    assert on_host == [before[page] for page in pages]

    fill_device(pool, seed=2)
    after = [device_page(pool, page) for page in range(PAGES)]
    back = list(reversed(pages))
    happened(executor, [to_device(2, slots, back)], includes(TransferEnded(2, ok=True)))

    expected = dict(zip(back, on_host, strict=True))
    assert [device_page(pool, page) for page in range(PAGES)] == [
        expected.get(page, unchanged) for page, unchanged in enumerate(after)
    ]
    moved = executor.counts().bytes_moved
    assert moved.l1_to_l2 == moved.l2_to_l1 == len(pages) * executor.host_pool.layout.page_bytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rank", "tp_size"), [(0, 1), (1, 2), (3, 4)])
def test_host_pages_are_in_the_order_that_ranks_of_all_sizes_share(
    start: Start, rank: int, tp_size: int, device: str
) -> None:
    layout, place = REFERENCE_LAYOUTS["optional"], place_of(rank, tp_size)
    absent = ["narrow"]
    shard = layout.shard(rank, tp_size, absent=absent)
    executor = start(shard, device, 2)
    for part in shard.columns:
        tensor = executor.device_pool.column(part.column.name)
        content = b"".join(
            head_bytes(layout, part.column, layer, head, page)
            for layer in range(part.layers)
            for page in range(2)
            for head in range(part.head_first, part.head_first + part.heads)
        )
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        tensor.view(torch.uint8).copy_(values.view(tensor.view(torch.uint8).shape))

    happened(executor, [to_host(1, [0, 1], [1, 0])], includes(TransferEnded(1, ok=True)))

    assert [bytes(executor.host_pool.page(slot)) for slot in (1, 0)] == [
        reference_page(layout, place, absent, page) for page in range(2)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_larger_than_the_staging_buffer_are_whole(start: Start, device: str) -> None:
    # A copy on a CPU has no staging buffer, and runs in pieces of 8 MiB.
    count = 8 if device == "cpu" else 40
    executor = start(plain_layout(3 << 20), device, count)
    fill_device(executor.device_pool, seed=4)
    pages = random.Random(5).sample(range(count), count)

    happened(executor, [to_host(1, pages, list(range(count)))], includes(TransferEnded(1, ok=True)))
    before = [bytes(executor.host_pool.page(slot)) for slot in range(count)]
    assert before == [device_page(executor.device_pool, page) for page in pages]

    fill_device(executor.device_pool, seed=5)
    happened(
        executor, [to_device(2, list(range(count)), pages)], includes(TransferEnded(2, ok=True))
    )

    assert [device_page(executor.device_pool, page) for page in pages] == before


@pytest.mark.parametrize("device", DEVICES)
def test_one_copy_moves_pages_of_several_pools_each_in_its_own_layout(
    start: Start, device: str
) -> None:
    executor = start(grouped_layout(), device, components=COMPONENTS)
    pools = executor.device_pools
    for seed, pool in enumerate(pools.values()):
        fill_device(pool, seed)
    transfers = tuple(CopyTransfer(name, (7, 3, 0), (1, 2, 9)) for name in pools)
    before = {name: device_page(pool, 3) for name, pool in pools.items()}

    happened(executor, [CopyToHost(1, transfers, LONG_S)], includes(TransferEnded(1, ok=True)))
    back = tuple(CopyTransfer(name, (2,), (40,)) for name in pools)
    happened(executor, [CopyToDevice(2, back, LONG_S)], includes(TransferEnded(2, ok=True)))

    hosts = executor.host_pools
    assert {name: bytes(host.page(2)) for name, host in hosts.items()} == before
    assert {name: device_page(pool, 40) for name, pool in pools.items()} == before
    rows = sum(host.layout.page_bytes for host in hosts.values())
    assert executor.counts().bytes_moved.l1_to_l2 == 3 * rows
    assert executor.counts().bytes_moved.l2_to_l1 == rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS | COMPONENTS)
def test_a_fork_copies_every_byte_of_one_page_and_touches_no_other(
    start: Start, layout: str, device: str
) -> None:
    executor = start((LAYOUTS | COMPONENTS)[layout], device)
    fill_device(executor.device_pool, seed=12)
    before = [device_page(executor.device_pool, page) for page in range(PAGES)]

    executor.carry_out([Fork(KV_POOL, source=5, destination=2)])

    after = [device_page(executor.device_pool, page) for page in range(PAGES)]
    assert after == [*before[:2], before[5], *before[3:]]
    assert executor.progress() == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_in_one_pool_leaves_the_others_alone(start: Start, device: str) -> None:
    executor = start(grouped_layout(), device, components=COMPONENTS)
    pools = executor.device_pools
    for seed, pool in enumerate(pools.values()):
        fill_device(pool, seed)
    before = {name: device_page(pool, 2) for name, pool in pools.items()}

    executor.carry_out([Fork("state", source=5, destination=2)])

    forked = {"state": device_page(pools["state"], 5)}
    assert {name: device_page(pool, 2) for name, pool in pools.items()} == before | forked


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_ordered_after_a_fork_sees_the_page_that_was_forked(
    start: Start, device: str
) -> None:
    executor = start(mixed_layout(), device)
    fill_device(executor.device_pool, seed=13)
    source = device_page(executor.device_pool, 0)

    happened(executor, [Fork(KV_POOL, 0, 1), Fork(KV_POOL, 1, 2), to_host(1, [2], [6])], bool)

    assert bytes(executor.host_pool.page(6)) == source


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "fork",
    [Fork(KV_POOL, PAGES, 0), Fork(KV_POOL, 0, PAGES), Fork(KV_POOL, -1, 0), Fork("none", 0, 0)],
    ids=["source", "destination", "negative", "unknown pool"],
)
def test_a_fork_of_a_page_that_there_is_not_is_a_bug_and_says_so(
    start: Start, fork: Fork, device: str
) -> None:
    executor = start(mixed_layout(), device)

    with pytest.raises(InternalError, match="a fork"):
        executor.carry_out([fork])


@pytest.mark.parametrize("device", DEVICES)
def test_copies_of_both_directions_at_once_keep_to_their_own_pages(
    start: Start, device: str
) -> None:
    executor = start(grouped_layout(), device)
    fill_device(executor.device_pool, seed=6)
    happened(
        executor,
        [to_host(1, list(range(24)), list(range(24)))],
        includes(TransferEnded(1, ok=True)),
    )
    saved = [bytes(executor.host_pool.page(slot)) for slot in range(24)]
    fill_device(executor.device_pool, seed=7)
    content = [device_page(executor.device_pool, page) for page in range(PAGES)]

    orders: list[CopyToDevice | CopyToHost] = []
    for part in range(8):
        loaded = list(range(3 * part, 3 * part + 3))
        backed_up = [24 + page for page in loaded]
        orders += [to_device(10 + part, loaded, loaded), to_host(20 + part, backed_up, backed_up)]
    happened(
        executor, orders, includes(*(TransferEnded(order.operation, ok=True) for order in orders))
    )

    assert [device_page(executor.device_pool, page) for page in range(24)] == saved
    assert [bytes(executor.host_pool.page(slot)) for slot in range(24, 48)] == content[24:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "transfer",
    [
        CopyTransfer(KV_POOL, (0, PAGES), (0, 1)),
        CopyTransfer(KV_POOL, (0,), (-1,)),
        CopyTransfer(KV_POOL, (0, 1), (0,)),
        CopyTransfer("no such pool", (0,), (0,)),
    ],
    ids=["beyond the pool", "negative", "lengths differ", "unknown pool"],
)
def test_a_copy_that_cannot_be_made_is_an_outcome_and_the_next_one_goes_well(
    start: Start, transfer: CopyTransfer, device: str
) -> None:
    executor = start(mixed_layout(), device)

    progress = happened(executor, [CopyToHost(1, (transfer,), LONG_S)], bool)
    progress += happened(executor, [to_host(2, [0], [0])], bool)

    assert progress == [TransferEnded(1, ok=False), TransferEnded(2, ok=True)]
    assert executor.trouble() is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_whose_time_is_up_has_failed_and_is_quiet_when_it_really_ends(
    start: Start, held: Callable[..., HeldTransfers], device: str
) -> None:
    executor = start(mixed_layout(), device)
    transfers = held(CopyTransfer(KV_POOL, (0,), (0,)))

    assert happened(executor, [CopyToHost(1, transfers, SOON_S)], bool) == [
        TransferEnded(1, ok=False)
    ]
    assert happened(executor, [Cancel(1, SOON_S)], bool) == [QuiesceExpired(1)]

    let_go(transfers)
    assert waited(executor, bool) == [Quiesced(1)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_cancelled_copy_that_has_not_begun_touches_nothing(
    start: Start, held: Callable[..., HeldTransfers], device: str
) -> None:
    executor = start(mixed_layout(), device)
    fill_device(executor.device_pool, seed=8)
    transfers = held(CopyTransfer(KV_POOL, (0,), (0,)))
    executor.carry_out([CopyToHost(1, transfers, LONG_S), to_host(2, [1], [1]), Cancel(2, LONG_S)])

    let_go(transfers)
    progress = waited(executor, includes(Quiesced(2)))

    assert progress == [TransferEnded(1, ok=True), TransferEnded(2, ok=False), Quiesced(2)]
    assert not any(executor.host_pool.page(1))


class LethalTransfers(tuple[CopyTransfer, ...]):
    __slots__ = ()

    def __iter__(self) -> Iterator[CopyTransfer]:
        raise SystemExit("lethal")


@pytest.mark.parametrize(
    ("device", "thread"),
    [
        ("cpu", "lockstep-copies"),
        pytest.param("cuda", "lockstep-feed-TO_HOST", marks=pytest.mark.gpu),
    ],
)
def test_a_rank_whose_copying_thread_has_died_cannot_go_on_and_names_it(
    start: Start, device: str, thread: str
) -> None:
    executor = start(mixed_layout(), device)

    executor.carry_out([CopyToHost(1, LethalTransfers(), LONG_S)])
    executor.close()

    assert executor.trouble() == f"the thread {thread} has ended: SystemExit('lethal')"


@pytest.mark.parametrize("device", DEVICES)
def test_close_waits_for_the_copy_that_runs_and_drops_the_rest(start: Start, device: str) -> None:
    executor = start(plain_layout(1 << 20), device)
    executor.carry_out([to_host(n, list(range(PAGES)), list(range(PAGES))) for n in range(20)])

    executor.close()

    progress = executor.progress()
    assert sorted(each.operation for each in progress) == list(range(20))
    assert progress[-1].operation == 19 or device != "cpu"
    assert not any(
        thread.name == "lockstep-copies" and thread.is_alive() for thread in threading.enumerate()
    )


@pytest.mark.parametrize("layout", LAYOUTS | UNITED)
def test_gather_and_scatter_are_each_other_s_inverse(layout: str) -> None:
    shard = (LAYOUTS | UNITED)[layout]
    cpu = torch.device("cpu")
    device = DevicePool(shard, 9, cpu)
    pools = TierPools(device, HostPool(shard, 1, pinned=False))
    fill_device(device, seed=9)
    chosen = [7, 2, 5, 0]
    pages = torch.tensor(chosen)
    staging = torch.zeros(4, shard.page_bytes, dtype=torch.uint8)
    before = [device_page(device, page) for page in range(9)]

    gather(slab_pairs(pools), pages, staging)

    rows = [row.numpy().tobytes() for row in staging]
    assert rows == [before[page] for page in chosen]

    fill_device(device, seed=10)
    after = [device_page(device, page) for page in range(9)]
    scatter(slab_pairs(pools), pages, staging)
    expected = dict(zip(chosen, rows, strict=True))
    assert [device_page(device, page) for page in range(9)] == [
        expected.get(page, after[page]) for page in range(9)
    ]


def test_neighbouring_pages_are_copied_together() -> None:
    pairs = [(0, 5), (1, 6), (2, 7), (3, 9), (5, 10), (6, 11)]

    hosts, devices = np.array(pairs).T
    none = np.array([], np.int64)
    assert list(page_runs(hosts, devices, 2)) == [(0, 5, 2), (2, 7, 1), (3, 9, 1), (5, 10, 2)]
    assert list(page_runs(none, none, 2)) == []


FORCED = {"copy engine": 0, "kernel": 1 << 60}
"""Minimum size in bytes of a run of host pages for the copy engine. The kernel moves shorter runs."""
SCATTERED = LAYOUTS | UNITED | {f"{size} bytes": plain_layout(size) for size in (8 << 10, 3 << 20)}


@pytest.mark.gpu
@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.parametrize("layout", SCATTERED)
def test_scattered_pages_keep_every_byte_whether_a_kernel_moves_them_or_not(
    start: Start, layout: str, forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: set[bool] = set()
    kernels = cuda_copies.row_kernels

    def noted(kernel: MoveRows, *tensors: torch.Tensor, to_host: bool) -> None:
        moved.add(to_host)
        kernel(*tensors, to_host=to_host)

    def noting(pools: Mapping[str, TierPools], device: torch.device) -> dict[str, MoveRows]:
        return {
            name: cast("MoveRows", partial(noted, kernel))
            for name, kernel in kernels(pools, device).items()
        }

    monkeypatch.setattr(cuda_copies, "row_kernels", noting)
    monkeypatch.setattr(cuda_copies, "LONG_RUN_BYTES", FORCED[forced])
    monkeypatch.setattr(cuda_copies, "FEW_RUNS", 0)

    # Host pages in this order have gaps between them, so no two copies can be merged.
    there_and_back(start(SCATTERED[layout], "cuda"), ORDERS["every third"])

    by_kernel = forced == "kernel" and SCATTERED[layout].page_bytes % 16 == 0
    assert moved == ({True, False} if by_kernel else set())


def test_without_triton_pages_are_copied_all_the_same_and_the_log_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lockstep.ranks.executor.kernels.host_rows", raising=False)

    assert cuda_copies.row_kernels({}, torch.device("cuda", 0)) == {}

    assert "install triton" in caplog.text


@pytest.mark.gpu
def test_a_copy_to_the_host_sees_what_kernels_before_it_wrote(start: Start) -> None:
    executor = start(grouped_layout(), "cuda")
    pool = executor.device_pool
    engine = new_stream()
    with torch.cuda.stream(engine):
        sleep_on_the_device(KERNEL_CYCLES)
        for shard in pool.layout.columns:
            pool.column_bytes(shard).fill_(7)
        executor.carry_out([to_host(1, list(range(PAGES)), list(range(PAGES)))])
    waited(executor, includes(TransferEnded(1, ok=True)))

    assert bool((executor.host_pool.bytes_tensor == 7).all())


@pytest.mark.gpu
def test_a_load_back_waits_for_kernels_that_still_read_its_pages(start: Start) -> None:
    executor = start(grouped_layout(), "cuda")
    pool = executor.device_pool
    executor.host_pool.bytes_tensor.fill_(9)
    column = pool.column_bytes(pool.layout.columns[0])
    column.fill_(3)
    seen = torch.empty_like(column)
    torch.cuda.synchronize()
    engine = new_stream()
    with torch.cuda.stream(engine):
        sleep_on_the_device(KERNEL_CYCLES)
        seen.copy_(column)
        executor.carry_out([to_device(1, list(range(PAGES)), list(range(PAGES)))])
    waited(executor, includes(TransferEnded(1, ok=True)))

    with torch.cuda.stream(new_stream()):
        loaded = column.clone()
    torch.cuda.synchronize()
    assert bool((loaded == 9).all())
    assert bool((seen == 3).all())


@pytest.mark.gpu
def test_a_fork_keeps_its_place_among_the_engine_s_kernels(start: Start) -> None:
    executor = start(grouped_layout(), "cuda")
    pool = executor.device_pool
    column = pool.column_bytes(pool.layout.columns[0])
    torch.cuda.synchronize()
    engine = new_stream()
    with torch.cuda.stream(engine):
        sleep_on_the_device(KERNEL_CYCLES)
        column[:, 0].fill_(7)
        executor.carry_out([Fork(KV_POOL, 0, 1)])
        column[:, 0].fill_(8)
        seen = column[:, :2].clone()
    engine.synchronize()

    assert bool((seen[:, 0] == 8).all())
    assert bool((seen[:, 1] == 7).all())


@pytest.mark.gpu
def test_the_engine_s_stream_is_not_held_up_by_copies(start: Start) -> None:
    executor = start(plain_layout(8 << 20), "cuda")
    pages, last = list(range(PAGES)), 7
    executor.carry_out([to_host(number, pages, pages) for number in range(last + 1)])
    kernels_done = new_event()
    kernels_done.record()

    kernels_done.synchronize()
    progress = executor.progress()
    assert TransferEnded(last, ok=True) not in progress, (
        "the engine's stream ended no sooner than the copies"
    )
    waited(executor, includes(TransferEnded(last, ok=True)))


@pytest.mark.gpu
def test_pinned_memory_is_exactly_as_large_as_its_pages(start: Start) -> None:
    executor = start(mixed_layout(), "cuda")

    assert executor.host_pool.bytes_tensor.is_pinned()
    assert executor.host_pool.bytes_tensor.data_ptr() % 4096 == 0
