"""vLLM's own scheduler with the Lockstep connector, and workers with scripted executors.

No model runs: a step appends a fixed token to each scheduled request. Tests import this module only
when they run, because it imports vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lockstep.coordinator.lanes import BallotShape
from lockstep.integrations.vllm.worker_modes import Ballots, OpenedRank, PassMetadata
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.group.one_scheduler.worker import WorkerRank
from lockstep.ranks.protocol.config import HostCacheConfig
from lockstep.ranks.protocol.dispatch import OPENINGS, Opened
from lockstep.ranks.protocol.orders import CopyToDevice
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from tests.kit.ranks.in_turn import ScriptedExecutor
from tests.kit.vllm.group import lockstep_connector

BLOCK_TOKENS = 32
RANKS = 2
TOKEN = 7
"""The output token of every request."""

LAYOUT = PageLayout(
    page_tokens=BLOCK_TOKENS,
    columns=(
        Column(name="k", layers=1, heads=2, elements=16, dtype="float32"),
        Column(name="v", layers=1, heads=2, elements=16, dtype="float32"),
    ),
)


@dataclass
class Served:
    """An engine's scheduler and its workers, whose executors are scripted by the test."""

    model: Path
    blocks: int = 64
    ahead: bool = False
    """Whether the scheduler schedules a step before it has the output of the previous step."""
    scheduler: Any = field(init=False)
    executors: list[ScriptedExecutor] = field(init=False)
    failing: set[int] = field(default_factory=set[int])
    """The ranks on which every load fails from now on."""
    loads_failed: int = 0
    """Number of failed loads, summed over all ranks."""
    cached: dict[str, int] = field(default_factory=dict[str, int])
    """Number of cached tokens of each request, as vLLM reports it."""
    _under_way: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        config = EngineArgs(
            model=str(self.model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=8,
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=64 << 20,
            tensor_parallel_size=RANKS,
            distributed_executor_backend="mp",
            kv_transfer_config=lockstep_connector(host_pages=256),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = self.blocks
        config.scheduler_config.async_scheduling = self.ahead
        spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32)
        layers = KVCacheConfig(self.blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(
            config, layers, StructuredOutputManager(config), BLOCK_TOKENS, log_stats=True
        )
        self.executors = [ScriptedExecutor() for _ in range(RANKS)]
        self._open()
        hash_of = get_hash_fn_by_name("sha256")
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_of)

    def _open(self) -> None:
        config = HostCacheConfig(model="m", layout=LAYOUT, host_pages=256)
        replica = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"model")
        shape = BallotShape(world_size=RANKS, prefetch_slots=config.bounds.prefetches)
        self.workers = [WorkerRank(each, shape, at) for at, each in enumerate(self.executors)]
        self._opened = [Opened(rank, RANKS, config, replica, "") for rank in range(RANKS)]
        self.tell_of_workers()

    def tell_of_workers(self, **changed: Any) -> None:
        """Send each worker's handshake to the scheduler, with the fields in `changed` replaced."""
        handshakes = [
            OpenedRank(OPENINGS.encode(structs.replace(each, **changed))) for each in self._opened
        ]
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): each for rank, each in enumerate(handshakes)}
        )

    @property
    def free_blocks(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def send(self, name: str, tokens: Sequence[int], output_tokens: int = 2) -> Any:
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self._under_way.append(scheduled)
        if not self.ahead or len(self._under_way) == 2:
            self._output(self._under_way.pop(0))

    def run(self, most: int = 200) -> None:
        """Step until all requests have finished; fail if that takes more than `most` steps."""
        for _ in range(most):
            if self.scheduler.has_requests():
                self.step()
            elif self._under_way:
                self._output(self._under_way.pop(0))
            else:
                return
        raise AssertionError(f"requests are left after {most} steps")

    def _output(self, scheduled: Any) -> None:
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, PassMetadata)
        ballots: list[Ballots] = []
        for worker, executor in zip(self.workers, self.executors, strict=True):
            worker.apply_dispatch(metadata.dispatch)
            self._carry_out(worker.rank, executor)
            folded = worker.vote()
            ballots += [] if folded is None else [Ballots(folded)]
        names = list(scheduled.num_scheduled_tokens)
        connector_output = KVConnectorOutput(
            finished_sending=set(metadata.result.freed),
            finished_recving=set(metadata.result.loaded),
            failed_recving=set(metadata.result.failed),
            kv_connector_worker_meta=reduce(Ballots.aggregate, ballots) if ballots else None,
        )
        sampled = [[TOKEN] if self._samples(name, scheduled) else [] for name in names]
        output = ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in outputs.outputs:
                if each.prefill_stats is not None:
                    self.cached[each.request_id] = each.prefill_stats.num_cached_tokens

    def _samples(self, name: str, scheduled: Any) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and request.num_computed_tokens >= request.num_prompt_tokens

    def _carry_out(self, rank: int, executor: ScriptedExecutor) -> None:
        if rank in self.failing and executor.given(CopyToDevice):
            loads = executor.take(CopyToDevice)
            self.loads_failed += len(loads)
            executor.complete()
            executor.orders += loads
            executor.fail()
        else:
            executor.complete()
