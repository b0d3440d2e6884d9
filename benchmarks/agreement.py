"""What a step's agreement costs, beside one bare all_reduce and beside one collective per request.

Two processes, each with a real cache whose store never answers, so that a fixed number of prefetches
stays in every ballot. Three things are measured in turns in the same run: a whole step at depth 0
(ballot, round, verdict), one bare all_reduce of the same vector on the same kind of group, and
1 + K all_reduces of one lane, which is what a vote inside per-request code amounts to.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ..coordinator.collectives.base import Vector
from ..coordinator.collectives.torch_gloo import TorchCollective
from ..launch.environment import is_rank
from ..ranks.cache import Cache
from ..ranks.config import Bounds, CacheConfig
from ..ranks.page_layout import Column, PageLayout
from ..ranks.replica.settings import ReplicaConfig
from .silent_executor import SilentExecutor

PREFETCHES = 32
BLOCKS = 20
STEPS_IN_A_BLOCK = 50
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of many repetitions of one thing."""

    p50: float
    p99: float

    @classmethod
    def of(cls, samples_s: list[float]) -> "Timing":
        """Return the median and the 99th percentile."""
        ordered = sorted(samples_s)
        return cls(
            p50=statistics.median(ordered) * 1e6, p99=ordered[int(len(ordered) * 0.99)] * 1e6
        )


def run(ranks: int = 2) -> None:
    """Start the ranks and let rank 0 print the table."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    subprocess.run(
        [*command, "-m", "lockstep.benchmarks.agreement"], check=True, timeout=10 * TIMEOUT_S
    )


def measure() -> dict[str, Timing]:
    """Measure on this rank; collective. The process group must be initialised."""
    cache = _busy_cache(TorchCollective.create(timeout_s=TIMEOUT_S))
    bare = TorchCollective.create(timeout_s=TIMEOUT_S)
    lanes: Vector = np.zeros(cache.rounds.shape.length, dtype=np.int64)
    lane: Vector = np.zeros(1, dtype=np.int64)

    def per_request() -> None:
        for _ in range(1 + PREFETCHES):
            bare.launch(lane).wait(TIMEOUT_S)

    things: dict[str, Callable[[], object]] = {
        "step": cache.step,
        "bare": lambda: bare.launch(lanes).wait(TIMEOUT_S),
        "per request": per_request,
    }
    samples: dict[str, list[float]] = {name: [] for name in things}
    for _ in range(BLOCKS):
        for name, thing in things.items():
            for _ in range(STEPS_IN_A_BLOCK):
                began = time.perf_counter()
                thing()
                samples[name].append(time.perf_counter() - began)
    cache.close(flush=False)
    bare.close()
    return {name: Timing.of(each) for name, each in samples.items()}


def _busy_cache(collective: TorchCollective) -> Cache:
    layout = PageLayout(page_tokens=16, columns=(Column(name="kv", layers=1, heads=8, elements=1),))
    config = CacheConfig(
        model="bench",
        layout=layout,
        device_pages=1,
        host_pages=4 * PREFETCHES,
        store="memory://bench",
        pipeline_depth=0,
        bounds=Bounds(prefetches=PREFETCHES),
    )
    replica_config = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"bench")
    cache = Cache(config, collective, SilentExecutor(), replica_config)
    for number in range(PREFETCHES):
        cache.prefetch(f"request {number}", [number] * layout.page_tokens)
    return cache


def main() -> None:
    """Be a rank if started as one, else start the ranks."""
    if not is_rank():
        run()
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    timings = measure()
    if dist.get_rank() == 0:
        limit = timings["bare"].p50
        title = f"agreement, {dist.get_world_size()} ranks, {PREFETCHES} prefetches in flight"
        sys.stdout.write(f"{title}, microseconds\n")
        for name, timing in timings.items():
            sys.stdout.write(
                f"  {name:<12} p50 {timing.p50:9.1f}   p99 {timing.p99:9.1f}"
                f"   {timing.p50 / limit:6.2f} x bare all_reduce\n"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
