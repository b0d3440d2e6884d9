"""What the plug-in uses of vLLM 0.32's objects, and nothing else; its bases are in `connector`."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, Protocol

import torch

from ..kv_description import PretrainedConfig
from .block_forms import AttentionLayer


class MultiModalPosition(Protocol):
    """The place of an item of another modality in the prompt."""

    offset: int
    length: int

    @property
    def is_embed(self) -> object | None:
        """Which of the placeholders the item's embeddings stand in for; None for all."""
        ...


class MultiModalFeature(Protocol):
    """An item of another modality; its identifier is a hash of it, or a client's word."""

    identifier: str
    modality: str

    @property
    def data(self) -> object | None:
        """The model's inputs by name, each in the `data` of an object; None if they are elsewhere."""
        ...

    @property
    def mm_position(self) -> MultiModalPosition: ...


class LoraRequest(Protocol):
    """An adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    is_3d_lora_weight: bool


class VllmRequest(Protocol):
    """`vllm.v1.request.Request`. The scheduler keeps it up to date; it is the same object always."""

    request_id: str
    resumable: bool
    skip_reading_prefix_cache: bool
    prompt_embeds: object | None
    cache_salt: str | None
    num_computed_tokens: int
    num_output_placeholders: int
    """Tokens that are being computed in passes whose output the scheduler has not seen yet."""
    kv_transfer_params: object
    """What the router has said of other engines: a map, unless a client has sent something else."""

    @property
    def status(self) -> Enum: ...
    @property
    def lora_request(self) -> LoraRequest | None: ...
    @property
    def mm_features(self) -> Sequence[MultiModalFeature]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Blocks(Protocol):
    """`vllm.v1.core.kv_cache_manager.KVCacheBlocks`: the blocks of a request by group of layers."""

    def get_block_ids(self) -> tuple[Sequence[int], ...]: ...


class BlockState(Protocol):
    """`vllm.v1.core.sched.output.KVConnectorBlockState`."""

    @property
    def resolve_block_ids(self) -> Callable[[str], tuple[Sequence[int], ...]]:
        """Give the block ids of a scheduled request, for each group of layers."""
        ...


class BlockPool(Protocol):
    """`vllm.v1.core.block_pool.BlockPool`: the blocks of all groups."""

    blocks: Sequence[Any]
    """By block id."""
    cached_block_hash_to_block: Any
    """Those that vLLM's own prefix cache can find."""

    @property
    def touch(self) -> Callable[[Sequence[Any]], object]:
        """Count one user more for each of these blocks."""
        ...

    @property
    def free_blocks(self) -> Callable[[Sequence[Any]], object]:
        """Count one user less; a block without any is free, and the first ones are taken first."""
        ...

    @property
    def unpin_blocks(self) -> Callable[[Sequence[Any], Callable[[Any], None]], object]:
        """Do the same, and call back for each block that is handed out, or reset, after that."""
        ...


class ScheduledStep(Protocol):
    """`vllm.v1.core.sched.output.SchedulerOutput`."""

    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: AbstractSet[str] | None
    kv_connector_block_state: BlockState | None
    """The block tables of what is scheduled."""


class TransferOutput(Protocol):
    """`vllm.v1.outputs.KVConnectorOutput`; the scheduler reads it after the connector has."""

    finished_sending: set[str] | None
    finished_recving: set[str] | None
    kv_connector_worker_meta: object | None
    """What the workers' halves have returned in this step, aggregated."""


class TransferConfig(Protocol):
    """`vllm.config.KVTransferConfig`."""

    engine_id: str | None
    kv_connector: str | None
    is_kv_producer: bool
    is_kv_consumer: bool
    kv_load_failure_policy: str
    kv_connector_extra_config: dict[str, Any]


class ParallelConfig(Protocol):
    """`vllm.config.ParallelConfig`."""

    world_size: int
    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    distributed_executor_backend: object
    worker_cls: str


class ModelConfig(Protocol):
    """`vllm.config.ModelConfig`."""

    model: str
    model_weights: str
    """The place of the weights, if that is not where the model is; else empty."""
    revision: str | None
    """The commit, where the model is a repository that is not on this host's disk."""
    seed: int
    dtype: object
    """The type in which the model is computed; torch's."""

    @property
    def hf_config(self) -> PretrainedConfig: ...


class LoadConfig(Protocol):
    """`vllm.config.LoadConfig`."""

    load_format: str


class PrefixCacheConfig(Protocol):
    """`vllm.config.CacheConfig`."""

    prefix_caching_hash_algo: str


class EventsConfig(Protocol):
    """`vllm.config.KVEventsConfig`."""

    enable_kv_cache_events: bool


class SpeculativeConfig(Protocol):
    """`vllm.config.SpeculativeConfig`."""

    @property
    def draft_model_config(self) -> ModelConfig | None: ...
    @property
    def draft_load_config(self) -> LoadConfig | None: ...


class EncoderTransferConfig(Protocol):
    """`vllm.config.ECTransferConfig`."""

    is_ec_consumer: bool
    """Whether other engines give this one the embeddings of items, by their identifiers."""


class AttentionConfig(Protocol):
    """`vllm.config.AttentionConfig`."""

    hisparse_config: object
    """How the KV of a sparse attention is kept in host memory, if it is."""


class CompilationConfig(Protocol):
    """`vllm.config.CompilationConfig`."""

    @property
    def static_forward_context(self) -> Mapping[str, AttentionLayer]:
        """The model's layers by their names, once the model is loaded, in the worker's process."""
        ...


class EngineConfig(Protocol):
    """`vllm.config.VllmConfig`."""

    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def load_config(self) -> LoadConfig: ...
    @property
    def parallel_config(self) -> ParallelConfig: ...

    lora_config: Any

    @property
    def speculative_config(self) -> SpeculativeConfig | None: ...
    @property
    def kv_transfer_config(self) -> TransferConfig | None: ...
    @property
    def ec_transfer_config(self) -> EncoderTransferConfig | None: ...
    @property
    def attention_config(self) -> AttentionConfig: ...
    @property
    def compilation_config(self) -> CompilationConfig: ...
    @property
    def use_v2_model_runner(self) -> bool: ...


class PublishingEngine(EngineConfig, Protocol):
    """`vllm.config.VllmConfig`, with what says which KV events are published and how."""

    @property
    def cache_config(self) -> PrefixCacheConfig: ...
    @property
    def kv_events_config(self) -> EventsConfig | None: ...


class AttentionSpec(Protocol):
    """`vllm.v1.kv_cache_interface.AttentionSpec`."""

    block_size: int
    head_size: int
    head_size_v: int
    num_head_slots: int | None
    """The heads of a block, where they are not the model's KV heads."""
    tokens_per_state: int
    """How many tokens one entry stands for."""
    state_content_bytes: int | None
    """What one head and token take, where it is not the elements of a key and a value."""


class WindowSpec(Protocol):
    """`vllm.v1.kv_cache_interface.SlidingWindowSpec`."""

    sliding_window: int
    """The last tokens that a token attends to, itself included."""
    extra_retained_tokens: int
    """Tokens before these that are kept for drafts."""


class LatentSpec(Protocol):
    """`vllm.v1.kv_cache_interface.MLAAttentionSpec`."""

    block_size: int

    @property
    def cache_role(self) -> Enum: ...


class StateSpec(Protocol):
    """`vllm.v1.kv_cache_interface.MambaSpec`."""

    block_size: int
    shapes: Sequence[tuple[int, ...]]
    """What one rank has: the inputs of a convolution, and what the recurrence has come to."""
    dtypes: Sequence[torch.dtype]
    """The types of these."""
    mamba_type: Enum
    """What computes it; a `MambaAttentionBackendEnum`."""
    mamba_cache_mode: str
    """Which states are kept."""
    tp_replicated: bool
    """Whether every rank has all of it."""


class CacheGroup(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheGroupSpec`."""

    layer_names: list[str]
    kv_cache_spec: AttentionSpec
    """What the layers of the group keep."""


class EngineCacheConfig(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig`."""

    @property
    def kv_cache_groups(self) -> Sequence[CacheGroup]: ...


class HashedCacheConfig(EngineCacheConfig, Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig`, with how its blocks are hashed."""

    hash_block_size: int | None
    """Tokens that one hash of the engine's takes in."""
    needs_kv_cache_zeroing: bool
    """Whether workers overwrite a block with zeros before a request gets it."""
