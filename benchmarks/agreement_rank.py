"""One rank of the agreement benchmark: measures a real cache, and bare collectives as lower bounds."""

import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from ..coordinator.collective import Collective, PendingRound, Vector
from ..coordinator.collectives.connecting import connect
from ..coordinator.collectives.torch_gloo import TorchCollective
from ..coordinator.lanes import BallotShape, fold
from ..page_format.page_layout import Column, PageLayout
from ..ranks.group.cache import Cache
from ..ranks.protocol.config import Bounds, CacheConfig
from ..ranks.protocol.replica_config import ReplicaConfig
from .agreement_settings import AgreementSettings
from .rank_processes import RankProcess, Say
from .silent_executor import SilentExecutor

TIMEOUT_S = 60.0

STEPS, EXCHANGES, REDUCTIONS, REQUESTS, PIPELINED = 100, 100, 30, 5, 30
"""How often each call is repeated in one block of measurements."""

_LINE = 8
"""The number of 64-bit words in a cache line."""


RankSamples = defaultdict[str, list[float]]
"""The durations in seconds of each measured call. The keys are the calls' names in the report."""


class TimedCollective:
    """Wraps a transport to measure how long its rounds block the caller.

    Its `launch` returns the wrapper itself as the pending round, so that the wait is measured, too.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.launch_s = self.stall_s = self.wait_s = 0.0
        """Durations of the last round in seconds. `launch_s`: the launch. `stall_s`: the wait until the
        round completed. `wait_s`: that wait, and reading the result."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, lanes: Vector) -> PendingRound:
        began = time.perf_counter()
        self._inner.launch(lanes)
        self.launch_s = time.perf_counter() - began
        return self

    def wait(self, timeout_s: float) -> Vector:
        began = time.perf_counter()
        while not self._inner.came_back(timeout_s):
            pass
        self.stall_s = time.perf_counter() - began
        lanes: Vector = self._inner.wait(timeout_s)
        self.wait_s = time.perf_counter() - began
        return lanes


class BareExchange:
    """Lower bound of the duration of a shared-memory exchange.

    Each rank writes its row to one file, polls the file until all ranks have written theirs, and takes
    the minimum. The exchange has no checksum, no sleep and no deadline, and does not detect lost ranks.
    All ranks pass the same zeroed file of `size` bytes.
    """

    def __init__(self, path: Path, rank: int, ranks: int, lanes: int) -> None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), self.size(ranks, lanes))
        words = np.frombuffer(memory, dtype=np.int64).reshape(2, ranks, -1)
        self._numbers, self._rows = words[:, :, 0], words[:, :, _LINE : _LINE + lanes]
        self._rank, self._ranks = rank, ranks
        self._number = 0

    @staticmethod
    def size(ranks: int, lanes: int) -> int:
        """Return the size in bytes of the exchange file, from the numbers of ranks and of lanes."""
        return 2 * ranks * 8 * (_LINE + -(-lanes // _LINE) * _LINE)

    def exchange(self, lanes: Vector) -> Vector:
        """Return the element-wise minimum of all ranks' lanes."""
        self._number += 1
        parity, all_there = self._number & 1, [self._number] * self._ranks
        self._rows[parity, self._rank] = lanes
        self._numbers[parity, self._rank] = self._number
        numbers = self._numbers[parity]
        while numbers.tolist() != all_there:
            # Yield the core: another rank on the same core possibly has not written its row yet.
            os.sched_yield()
        return fold(self._rows[parity])


def measure(settings: AgreementSettings, member: RankProcess, say: Say) -> dict[str, object]:
    """Run the measurement as one of the ranks; return this rank's figures."""
    lanes = BallotShape(
        world_size=settings.ranks, prefetch_slots=max(1, settings.operations)
    ).length
    bare = _bare_exchange(member, lanes)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    alone = _connected(settings, member, lanes)
    caches = [_cache(settings, member, lanes, depth) for depth in (0, 1)]
    idle = Cache.open(_config(settings, depth=0), _connected(settings, member, lanes))
    vector = np.zeros(lanes, dtype=np.int64)
    _keep_a_core(member)
    samples: RankSamples = defaultdict(list)
    for number in range(settings.blocks):
        if not member.rank:
            say(f"measuring: block {number + 1} of {settings.blocks}")
        _step(*caches[0], samples)
        _repeat(EXCHANGES, idle.step, samples["idle_step"])
        _repeat(EXCHANGES, lambda: alone.launch(vector).wait(TIMEOUT_S), samples["exchange_alone"])
        _repeat(EXCHANGES, lambda: bare.exchange(vector), samples["shm"])
        _reduce(group, lanes, settings.operations, samples)
        # Do not time the first pipelined step, because there is no earlier round that it could wait
        # for. Run an untimed exchange after it, because otherwise a rank that starts late would delay
        # every timed round.
        caches[1][0].step()
        alone.launch(vector).wait(TIMEOUT_S)
        _step_pipelined(*caches[1], settings.work_us / 1e6, samples)
    blocking, timed = caches[0]
    stats = blocking.stats()
    for cache, _ in caches:
        cache.close(flush=False)
    idle.close(flush=False)
    alone.close()
    return {
        "transport": timed.transport,
        "lanes": lanes,
        "collectives_per_step": stats.collectives / stats.steps,
        **_figures(samples),
    }


def _keep_a_core(member: RankProcess) -> None:
    """Pin this thread to a core that no other rank uses, if there are enough cores.

    Without pinning, two ranks that wait for each other may share a core while another core is idle,
    which triples the step time. Gloo's threads are not pinned.
    """
    cores = sorted(os.sched_getaffinity(0))
    if member.ranks <= len(cores):
        os.sched_setaffinity(0, {cores[member.rank]})


def _bare_exchange(member: RankProcess, lanes: int) -> BareExchange:
    path = member.folder / "cells"
    if not member.rank:
        path.write_bytes(bytes(BareExchange.size(member.ranks, lanes)))
    dist.barrier()
    return BareExchange(path, member.rank, member.ranks, lanes)


def _connected(settings: AgreementSettings, member: RankProcess, lanes: int) -> Collective:
    group = TorchCollective.create(timeout_s=TIMEOUT_S)
    host = member.pretended_host(settings.hosts)
    return connect(group, settings.transport, lanes=lanes, timeout_s=TIMEOUT_S, host=host)


def _cache(
    settings: AgreementSettings, member: RankProcess, lanes: int, depth: int
) -> tuple[Cache, TimedCollective]:
    collective = TimedCollective(_connected(settings, member, lanes))
    config = _config(settings, depth)
    replica_config = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"bench")
    cache = Cache(config, cast("Collective", collective), SilentExecutor(), replica_config)
    for number in range(settings.operations):
        cache.prefetch(f"request {number}", [number] * config.layout.page_tokens)
    return cache, collective


def _config(settings: AgreementSettings, depth: int) -> CacheConfig:
    kv = Column(name="kv", layers=1, heads=settings.ranks, elements=1)
    return CacheConfig(
        model="bench",
        layout=PageLayout(page_tokens=16, columns=(kv,)),
        device_pages=1,
        host_pages=4 * settings.operations + 1,
        store="memory://bench",
        pipeline_depth=depth,
        bounds=Bounds(prefetches=max(1, settings.operations)),
    )


def _step(cache: Cache, collective: TimedCollective, samples: RankSamples) -> None:
    for _ in range(STEPS):
        began = time.perf_counter()
        cache.step()
        took = time.perf_counter() - began
        exchange = collective.launch_s + collective.wait_s
        samples["blocking"].append(took)
        samples["exchange"].append(exchange)
        samples["python"].append(took - exchange)


def _step_pipelined(
    cache: Cache, collective: TimedCollective, work_s: float, samples: RankSamples
) -> None:
    for _ in range(PIPELINED):
        began = time.perf_counter()
        while time.perf_counter() - began < work_s:
            pass
        began = time.perf_counter()
        cache.step()
        samples["pipelined_step"].append(time.perf_counter() - began)
        samples["pipelined_stall"].append(collective.stall_s)
        samples["pipelined_wait"].append(collective.wait_s)


def _reduce(group: Any, lanes: int, operations: int, samples: RankSamples) -> None:
    vector = torch.zeros(lanes, dtype=torch.int64)
    lane = torch.zeros(1, dtype=torch.int64)

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group)

    def per_request() -> None:
        for _ in range(1 + operations):
            reduce(lane)

    _repeat(REDUCTIONS, lambda: reduce(vector), samples["gloo"])
    _repeat(REQUESTS, per_request, samples["per_request"])


def _repeat(times: int, thing: Callable[[], object], samples_s: list[float]) -> None:
    for _ in range(times):
        began = time.perf_counter()
        thing()
        samples_s.append(time.perf_counter() - began)


def _figures(samples: RankSamples) -> dict[str, object]:
    times = {name: _percentiles(each) for name, each in samples.items()}
    gloo, shm, per_request = (times.pop(name)["p50"] for name in ("gloo", "shm", "per_request"))
    blocking, alone = times["blocking"]["p50"], times["exchange_alone"]["p50"]
    return {
        **{f"{name}_us": each for name, each in times.items()},
        "limit_us": {"gloo": gloo, "shm": shm},
        "per_request_us": per_request,
        "ratios": {
            "per_request_to_blocking": round(per_request / blocking, 2),
            "gloo_to_blocking": round(gloo / blocking, 2),
            "gloo_to_exchange": round(gloo / alone, 2),
            "exchange_to_shm": round(alone / shm, 2),
        },
    }


def _percentiles(samples_s: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(samples_s) * 1e6, [50, 99])
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}
