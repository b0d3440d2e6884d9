"""vLLM's own manager of tiers with Lockstep's tier in it, over real shared memory, step by step.

Imports vLLM, so it is imported where a test runs and not where it is collected.
"""

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from lockstep.integrations.vllm.tier.tier import LockstepTier
from tests.kit.waiting import wait_for

CHUNK_BYTES = 8192
CHUNKS = 5
ME = ReqContext(req_id="me")


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(each) for each in numbers]


def someone(name: str, **options: Any) -> ReqContext:
    return ReqContext(req_id=name, **options)


def filtered(name: str, wanted: tuple[str | None, str | None] | tuple[()] | None) -> ReqContext:
    """A request that allows loads from all tiers, from those of one kind, or from none."""
    if wanted is None:
        return someone(name)
    matchers = [TierMatcher(*_kinds(*wanted))] if wanted else []
    return someone(name, load_tier_filter=TierFilter(tuple(matchers)))


def _kinds(medium: str | None, locality: str | None) -> tuple[Medium | None, Locality | None]:
    return (
        None if medium is None else Medium(medium),
        None if locality is None else Locality(locality),
    )


def tier_of(store: str, **settings: Any) -> dict[str, Any]:
    """One entry of `secondary_tiers`."""
    return {
        "type": "LockstepTier",
        "module_path": "lockstep.integrations.vllm.tier",
        "store": store,
        "weights_version": "1",
        "on_reset": "keep",
        **settings,
    }


def ranks(world_size: int = 1, **changes: Any) -> OffloadingParallelConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=world_size,
        tp_size=world_size,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    return replace(parallel, **changes)


def configuration(
    *tiers: dict[str, Any],
    chunks: int = CHUNKS,
    parallel: OffloadingParallelConfig | None = None,
    events: bool = False,
    **changes: Any,
) -> OffloadingConfig:
    """What vLLM would tell of an engine with so many chunks of `CHUNK_BYTES` of host memory."""
    parallel = parallel or ranks()
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES // parallel.world_size,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": chunks * CHUNK_BYTES, "secondary_tiers": [*tiers]},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        kv_cache_layout="LBHNC",
    )
    return replace(config, **changes)


@dataclass
class Tiered:
    """vLLM's manager, and what its scheduler and its workers do with it."""

    config: OffloadingConfig
    spec: TieringOffloadingSpec = field(init=False)
    manager: TieringOffloadingManager = field(init=False)
    _known: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.spec = TieringOffloadingSpec(self.config)
        manager = self.spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager

    @property
    def tier(self) -> LockstepTier:
        """The first one."""
        (tier, *_) = self.manager.secondary_tiers
        assert isinstance(tier, LockstepTier)
        return tier

    @property
    def rows(self) -> torch.Tensor:
        """The host memory, as a worker has it mapped."""
        region = self.spec._scheduler_mmap
        assert region is not None
        memory: torch.Tensor = region.base_tensor
        return memory.view(torch.uint8).view(self.spec.num_chunks, -1)

    def row_of(self, key: OffloadKey, request: ReqContext = ME) -> torch.Tensor:
        """The bytes that a worker would load for a chunk that is a hit."""
        spec: Any = self.manager.prepare_load([key], request)
        self.manager.complete_load([key], request)
        return self.rows[int(spec.chunk_ids[0])].clone()

    def start(self, request: ReqContext = ME) -> None:
        """The scheduler sees a request for the first time."""
        if request.req_id not in self._known:
            self._known.add(request.req_id)
            self.manager.on_new_request(request)

    def store(
        self, wanted: Sequence[OffloadKey], request: ReqContext = ME, *, ok: bool = True
    ) -> None:
        """The workers copy chunks, of bytes that follow from the key, to host memory."""
        self.start(request)
        prepared: Any = self.manager.prepare_store(wanted, request)
        assert prepared is not None
        stored = prepared.keys_to_store
        for each, chunk in zip(stored, prepared.store_spec.chunk_ids, strict=True):
            self.rows[int(chunk)] = content(each)
        if stored:
            self.manager.complete_store(stored, request, success=ok)

    def step(self, new: Iterable[str] = ()) -> list[OffloadingEvent]:
        """The scheduler's step ends."""
        self.manager.on_schedule_end(ScheduleEndContext([*new], ()))
        return list(self.manager.take_events())

    def settle(self) -> list[OffloadingEvent]:
        """Steps, until nothing is on its way any more; returns what they told."""
        told: list[OffloadingEvent] = []

        def is_idle() -> bool:
            told.extend(self.step())
            return not self.manager.has_pending_work()

        wait_for(is_idle, "the end of all jobs")
        return told

    def found(self, wanted: Sequence[OffloadKey], request: ReqContext = ME) -> list[LookupResult]:
        """Look up as the scheduler does, again in each step, until all is known and on its way."""
        self.start(request)
        answers: list[LookupResult] = []

        def is_known() -> bool:
            answers[:] = [self.manager.lookup(each, request) for each in wanted]
            self.step()
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & {*answers}

        wait_for(is_known, "an answer to a lookup")
        return answers

    def hits(self, wanted: Sequence[OffloadKey], request: ReqContext = ME) -> list[bool]:
        """Say which chunks can be loaded in the end, and check that their bytes are the right ones."""
        answers = self.found(wanted, request)
        is_hit = [each is LookupResult.HIT for each in answers]
        for each, hit in zip(wanted, is_hit, strict=True):
            assert not hit or torch.equal(self.row_of(each, request), content(each))
        return is_hit

    def forget(self) -> None:
        """Empty the host memory, as vLLM does when weights change; the tier keeps what it has."""
        self.settle()
        self.manager.reset_cache()

    def know(self, wanted: Sequence[OffloadKey], request: ReqContext = ME) -> None:
        """Have the tier asked for chunks, and its answer there, without a load."""
        self.start(request)
        for each in wanted:
            self.tier.lookup(each, request)
        self.tier.on_schedule_end(ScheduleEndContext((), ()))
        wait_for(lambda: not any(self.is_unknown(each, request) for each in wanted))

    def is_unknown(self, key: OffloadKey, request: ReqContext = ME) -> bool:
        """Say whether the tier has no answer for a chunk yet."""
        return self.tier.lookup(key, request) is LookupResult.RETRY

    def remembered(self) -> int:
        """How many chunks the tier keeps answers for."""
        tier: Any = self.tier
        return len(tier._lookups)

    def jobs(self) -> list[int]:
        """The jobs that vLLM waits for, by their number of chunks."""
        return [len(each.transfer_job.keys) for each in self.manager._jobs.values()]

    def pins(self, key: OffloadKey) -> int:
        """How often a chunk is pinned in host memory."""
        pins: int = self.manager.primary_tier._policy.get(key).ref_cnt
        return pins

    def press(self) -> None:
        """Have the tier under pressure, whatever it does."""
        detector: Any = self.tier.bp_detector
        detector._under_pressure = True

    def counted(self, prefix: str) -> dict[str, float]:
        """What was counted since the last time, without the prefix and the tier's name."""
        stats = self.manager.get_stats()
        assert stats is not None
        found: dict[str, float] = {}
        for name, value in stats.reduce().items():
            metric, _, labels = name.partition(":(")
            ours = "LockstepTier" in labels
            if ours and metric.startswith(prefix):
                count = "_count" if labels.endswith("_count") else ""
                outcome = re.findall(r", '(\w+)'", labels)
                short = metric.removeprefix(prefix).removeprefix("_") + count
                found[" ".join([short, *outcome])] = value
        return found

    def exported(self, prefix: str) -> dict[str, float]:
        """What vLLM would export of what was counted since the last time, without the prefix."""
        registry = prometheus_client.CollectorRegistry()
        kinds = {
            each: partial(each, registry=registry)
            for each in (
                prometheus_client.Counter,
                prometheus_client.Gauge,
                prometheus_client.Histogram,
            )
        }
        extra = {**self.config.extra_config, "spec_name": "TieringOffloadingSpec"}
        engine = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
        )
        metrics = OffloadPromMetrics(engine, kinds, ["engine"], {0: ["0"]})
        stats = self.manager.get_stats()
        assert stats is not None
        metrics.observe(stats.data, 0)
        lines = prometheus_client.generate_latest(registry).decode().splitlines()
        pairs = [each.rpartition(" ") for each in lines if each.startswith(prefix)]
        return {
            name.removeprefix(f"{prefix}_"): float(value)
            for name, _, value in pairs
            if "_created{" not in name
        }

    def close(self) -> None:
        self.manager.shutdown()


def content(key: OffloadKey) -> torch.Tensor:
    """The bytes of a chunk."""
    seed = int.from_bytes(key, "big") % (1 << 32)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, CHUNK_BYTES, np.uint8))


def job(
    number: int, wanted: Sequence[OffloadKey], chunks: Sequence[int], *, reads: bool = False
) -> TransferJob:
    """A job as vLLM's manager hands it to a tier."""
    return TransferJob(number, [*wanted], np.array(chunks, np.int32), reads, ME)


def ended(tier: LockstepTier) -> list[JobResult]:
    """All jobs that were begun, in the order in which they ended."""
    tier.drain_jobs()
    return list(tier.get_finished_jobs())
