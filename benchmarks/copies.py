"""Throughput of page copies compared with plain copies of the same bytes, in the same run.

A second benchmark copies pages that an engine owns. It compares pages whose axes the copy must
transpose with pages whose axes it need not transpose.

On a CUDA device the upper bound is the throughput of one asynchronous copy between a device buffer and
pinned memory. On a CPU the upper bound is the throughput of one `memcpy` per page, as if pages were
contiguous. A single `memcpy` of everything is shown as well; from a few hundred MB on it is faster,
because it bypasses the CPU caches. Device pages are in random order, like a prefix's pages. Host pages
are in runs, because they are allocated together. The copies alternate, and the best round of each
counts.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch

from ..page_format.page_layout import Column, PageLayout, ShardLayout
from ..ranks.executor.copies import CopyEnded, CopyEngine, CpuCopies
from ..ranks.executor.cuda_copies import CudaCopies
from ..ranks.executor.engine_pages import AxisOrder, EnginePages
from ..ranks.executor.pools import DevicePool, HostPool, TierPools
from ..ranks.protocol.orders import KV_POOL, CopyTransfer, Direction

ROUNDS = 7
MEGABYTES = 256
HEAD = f"{'page':>10} {'run':>4} {'':>10} {'GB/s':>8} {'plain':>8} {'ratio':>6} {'whole':>8}"
_TIMEOUT_S = 300.0
_ROOM = 3
"""Number of host pages divided by the number of copied pages. It is 3, so that two copied runs are
rarely adjacent by chance."""


def model_layout(layers: int, heads: int, page_tokens: int) -> ShardLayout:
    """Return the layout of a model with bfloat16 keys and values of 128 elements per head."""
    columns = tuple(
        Column(name=name, layers=layers, heads=heads, elements=128) for name in ("k", "v")
    )
    return PageLayout(page_tokens=page_tokens, columns=columns).shard(0, 1)


def run(
    layout: ShardLayout,
    pages: int,
    *,
    device: str = "cpu",
    run_pages: int = 4,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """Measure copies of `pages` pages, in runs of `run_pages` adjacent host pages.

    Keys of the result: `page_bytes`; `to_host` and `to_device`, the GB/s of the copy engine from
    `begin` to its completion report; `plain_to_host` and `plain_to_device`, the GB/s of the upper
    bound; `whole_to_host` and `whole_to_device`, the GB/s of one copy of everything; `to_host_ratio`
    and `to_device_ratio`, the copy engine's GB/s divided by those of the upper bound.
    """
    pools = TierPools(
        DevicePool(layout, pages, torch.device(device)),
        HostPool(layout, _ROOM * pages, pinned=device != "cpu"),
    )
    _touch(pools)
    total = pages * layout.page_bytes
    engine, ended = _copy_engine(pools)
    plain = _plain_copies(pools, layout.page_bytes if device == "cpu" else total)
    whole = _plain_copies(pools, total)
    best: dict[str, float] = {"page_bytes": float(layout.page_bytes)}
    try:
        for number in range(rounds):
            on_device, on_host = _places(pages, run_pages, seed=number)
            for direction, name in (
                (Direction.TO_HOST, "to_host"),
                (Direction.TO_DEVICE, "to_device"),
            ):
                to_host = direction is Direction.TO_HOST
                ends = (on_device, on_host) if to_host else (on_host, on_device)
                transfer = CopyTransfer(KV_POOL, *ends)
                for key, work in (
                    (name, partial(_copy, engine, ended, direction, transfer)),
                    (f"plain_{name}", plain[direction]),
                    (f"whole_{name}", whole[direction]),
                ):
                    best[key] = max(best.get(key, 0.0), total / _timed(work) / 1e9)
    finally:
        engine.stop()
        engine.join(_TIMEOUT_S)
        pools.host.close()
    for name in ("to_host", "to_device"):
        best[f"{name}_ratio"] = best[name] / best[f"plain_{name}"]
    return best


def _copy_engine(pools: TierPools) -> tuple[CopyEngine, "SimpleQueue[CopyEnded]"]:
    """Return a copy engine between two pools, and the queue of its completion reports."""
    ended: SimpleQueue[CopyEnded] = SimpleQueue()
    make = CpuCopies if pools.device.device.type == "cpu" else CudaCopies
    return make({KV_POOL: pools}, ended.put), ended


def _touch(pools: TierPools) -> None:
    # Fault in the memory first, so that the kernel's page faults are not timed as part of a copy.
    pools.host.bytes_tensor.fill_(1)
    for shard in pools.layout.columns:
        for slab in pools.device.slabs(shard):
            slab.fill_(2)


def _places(pages: int, run_pages: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    generator = random.Random(seed)
    on_device = generator.sample(range(pages), pages)
    starts = generator.sample(range(0, _ROOM * pages, run_pages), -(-pages // run_pages))
    on_host = [page for start in starts for page in range(start, start + run_pages)]
    return tuple(on_device), tuple(on_host[:pages])


def _copy(
    engine: CopyEngine,
    ended: "SimpleQueue[CopyEnded]",
    direction: Direction,
    transfer: CopyTransfer,
) -> None:
    engine.begin(direction, (transfer,), 1)
    report = ended.get(timeout=_TIMEOUT_S)
    if not report.ok:
        raise RuntimeError(f"the copy failed: {report.reason}")


def _plain_copies(pools: TierPools, piece: int) -> dict[Direction, Callable[[], None]]:
    host = pools.host.bytes_tensor[: pools.device.pages].flatten()
    whole = torch.full_like(host, 3, device=pools.device.device)
    if pools.device.device.type == "cpu":
        # Restrict the plain copies to one thread, because the copy engine uses one.
        here, there = host.numpy(), whole.numpy()

        def to_host() -> None:
            for at in range(0, len(here), piece):
                np.copyto(here[at : at + piece], there[at : at + piece])

        def to_device() -> None:
            for at in range(0, len(here), piece):
                np.copyto(there[at : at + piece], here[at : at + piece])

        return {Direction.TO_HOST: to_host, Direction.TO_DEVICE: to_device}

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(pools.device.device)

    return {
        Direction.TO_HOST: lambda: copy(host, whole),
        Direction.TO_DEVICE: lambda: copy(whole, host),
    }


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Figure:
    """The throughput of copies of one page size, run length and direction, in GB/s; see `run`."""

    page_bytes: int
    run_pages: int
    direction: str
    copied: float
    plain: float
    ratio: float
    whole: float

    def row(self) -> str:
        """Format these throughputs as a row of the printed table, whose heading is `HEAD`."""
        return (
            f"{self.page_bytes >> 10:>6} KiB {self.run_pages:>4} {self.direction:>10} "
            f"{self.copied:>8.2f} {self.plain:>8.2f} {self.ratio:>6.2f} {self.whole:>8.2f}"
        )


def measure(device: str, megabytes: int) -> Iterator[Figure]:
    """Measure several page sizes and run lengths, each with `megabytes` MiB of pages."""
    for layers, heads, page_tokens in ((32, 8, 16), (32, 1, 64), (32, 1, 16), (4, 1, 16)):
        layout = model_layout(layers, heads, page_tokens)
        pages = max(1, (megabytes << 20) // layout.page_bytes)
        for run_pages in (1, 16):
            result = run(layout, pages, device=device, run_pages=run_pages)
            for name in ("to_host", "to_device"):
                yield Figure(
                    layout.page_bytes,
                    run_pages,
                    name,
                    result[name],
                    plain=result[f"plain_{name}"],
                    ratio=result[f"{name}_ratio"],
                    whole=result[f"whole_{name}"],
                )


def axis_orders(device: str, megabytes: int, page_tokens: int, run_pages: int) -> dict[str, float]:
    """Compare copies of heads-first engine pages with copies of tokens-first engine pages, alternately.

    The keys of the result are `to_host` and `to_device`. Each value is the median, over `ROUNDS` pairs
    of copies, of the heads-first duration divided by the tokens-first duration.
    """
    layout = model_layout(32, 8, page_tokens)
    pages = max(1, (megabytes << 20) // layout.page_bytes)
    made = {order: _lent(layout, pages, order, device) for order in AxisOrder}
    ratios: dict[str, list[float]] = {"to_host": [], "to_device": []}
    for number in range(ROUNDS):
        on_device, on_host = _places(pages, run_pages, seed=number)
        for direction, name in ((Direction.TO_HOST, "to_host"), (Direction.TO_DEVICE, "to_device")):
            ends = (on_device, on_host) if name == "to_host" else (on_host, on_device)
            transfer = CopyTransfer(KV_POOL, *ends)
            took = {
                order: _timed(partial(_copy, engine, ended, direction, transfer))
                for order, (engine, ended) in made.items()
            }
            ratios[name].append(took[AxisOrder.HEADS_FIRST] / took[AxisOrder.TOKENS_FIRST])
    for engine, _ in made.values():
        engine.stop()
        engine.join(_TIMEOUT_S)
    return {name: statistics.median(each) for name, each in ratios.items()}


def _lent(
    layout: ShardLayout, pages: int, order: AxisOrder, device: str
) -> tuple[CopyEngine, "SimpleQueue[CopyEnded]"]:
    tensors: dict[str, list[torch.Tensor]] = {}
    for shard in layout.columns:
        axes = (shard.heads, layout.page_tokens)
        turned = axes if order is AxisOrder.HEADS_FIRST else axes[::-1]
        shape = (pages, *turned, shard.column.elements)
        tensors[shard.column.name] = [
            torch.ones(shape, dtype=torch.bfloat16, device=device) for _ in range(shard.layers)
        ]
    host = HostPool(layout, _ROOM * pages, pinned=device != "cpu")
    host.bytes_tensor.fill_(1)
    return _copy_engine(TierPools(EnginePages(layout, tensors, order), host))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure several page sizes and run lengths, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    options = parser.parse_args(arguments)
    print(HEAD)
    for figure in measure(options.device, options.megabytes):
        print(figure.row(), flush=True)
    print("throughput of tokens-first pages relative to heads-first, 8 heads of 128 in bfloat16:")
    for page_tokens in (16, 64):
        for run_pages in (1, 16):
            ratio = axis_orders(options.device, options.megabytes, page_tokens, run_pages)
            print(
                f"pages of {page_tokens} tokens, {run_pages:>2} in a run: {ratio['to_host']:.2f} to the"
                f" host, {ratio['to_device']:.2f} to the device",
                flush=True,
            )


if __name__ == "__main__":
    main()
