"""Protocols for the attributes and methods of vLLM 0.32's objects that the plug-in uses.

Base classes of the plug-in's own classes are not here; they are imported from vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, Protocol

import torch

from ..kv_description import PretrainedConfig
from .block_forms import AttentionLayer


class MultiModalPosition(Protocol):
    """Position of a multimodal item in the prompt."""

    offset: int
    length: int

    @property
    def is_embed(self) -> object | None:
        """Mask of the placeholder tokens that embeddings replace; None if all are replaced."""
        ...


class MultiModalFeature(Protocol):
    """A multimodal item. Its identifier is a hash of its content, or a name given by a client."""

    identifier: str
    modality: str

    @property
    def data(self) -> object | None:
        """The item's model inputs by name, each with `data`; None if they are in another process."""
        ...

    @property
    def mm_position(self) -> MultiModalPosition: ...


class LoraRequest(Protocol):
    """`vllm.lora.request.LoRARequest`: a LoRA adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    is_3d_lora_weight: bool


class VllmRequest(Protocol):
    """`vllm.v1.request.Request`, which the scheduler updates; one object for the request's lifetime."""

    request_id: str
    resumable: bool
    skip_reading_prefix_cache: bool
    prompt_embeds: object | None
    cache_salt: str | None
    num_computed_tokens: int
    num_output_placeholders: int
    """Number of tokens in forward passes whose output the scheduler has not processed yet."""
    kv_transfer_params: object
    """The router's parameters for disaggregated prefill. They may have any type, because clients send
    them."""

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
    """`vllm.v1.core.kv_cache_manager.KVCacheBlocks`: a request's blocks by layer group."""

    def get_block_ids(self) -> tuple[Sequence[int], ...]: ...


class BlockState(Protocol):
    """The used fields of `vllm.v1.core.sched.output.KVConnectorBlockState`."""

    @property
    def resolve_block_ids(self) -> Callable[[str], tuple[Sequence[int], ...]]:
        """Function that returns the block ids of a scheduled request by layer group."""
        ...


class BlockPool(Protocol):
    """`vllm.v1.core.block_pool.BlockPool`: the blocks of all layer groups."""

    blocks: Sequence[Any]
    cached_block_hash_to_block: Any
    """Maps block hashes to the blocks that vLLM's own prefix cache can match."""

    @property
    def touch(self) -> Callable[[Sequence[Any]], object]:
        """Function that increments the refcount of each block."""
        ...

    @property
    def free_blocks(self) -> Callable[[Sequence[Any]], object]:
        """Function that decrements refcounts; blocks at 0 become free, and are reused in order."""
        ...

    @property
    def unpin_blocks(self) -> Callable[[Sequence[Any], Callable[[Any], None]], object]:
        """Function that frees blocks; it registers a callback for their reallocation or reset."""
        ...


class ScheduledStep(Protocol):
    """The used fields of `vllm.v1.core.sched.output.SchedulerOutput`."""

    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: AbstractSet[str] | None
    kv_connector_block_state: BlockState | None
    """Block tables of the requests that are scheduled in the step."""


class TransferOutput(Protocol):
    """`vllm.v1.outputs.KVConnectorOutput`; the connector changes it before the scheduler reads it."""

    finished_sending: set[str] | None
    finished_recving: set[str] | None
    kv_connector_worker_meta: object | None
    """Aggregated metadata that the workers' connectors returned in this step."""


class TransferConfig(Protocol):
    """The used fields of `vllm.config.KVTransferConfig`."""

    engine_id: str | None
    kv_connector: str | None
    is_kv_producer: bool
    is_kv_consumer: bool
    kv_load_failure_policy: str
    kv_connector_extra_config: dict[str, Any]


class ParallelConfig(Protocol):
    """The used fields of `vllm.config.ParallelConfig`."""

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
    """The used fields of `vllm.config.ModelConfig`."""

    model: str
    model_weights: str
    """Path of the weights if they are not in the model's folder; otherwise empty."""
    revision: str | None
    """Revision of a model in a Hugging Face repository; unused for a model with a local path."""
    seed: int
    dtype: object
    """The model's compute dtype, a `torch.dtype`."""

    @property
    def hf_config(self) -> PretrainedConfig: ...


class LoadConfig(Protocol):
    """The used fields of `vllm.config.LoadConfig`."""

    load_format: str


class PrefixCacheConfig(Protocol):
    """The used fields of `vllm.config.CacheConfig`."""

    prefix_caching_hash_algo: str


class EventsConfig(Protocol):
    """The used fields of `vllm.config.KVEventsConfig`."""

    enable_kv_cache_events: bool


class SpeculativeConfig(Protocol):
    """The used fields of `vllm.config.SpeculativeConfig`."""

    @property
    def draft_model_config(self) -> ModelConfig | None: ...
    @property
    def draft_load_config(self) -> LoadConfig | None: ...


class EncoderTransferConfig(Protocol):
    """The used fields of `vllm.config.ECTransferConfig`."""

    is_ec_consumer: bool
    """Whether other engines send multimodal embeddings to this engine, identified by the items'
    identifiers."""


class AttentionConfig(Protocol):
    """The used fields of `vllm.config.AttentionConfig`."""

    hisparse_config: object
    """Settings for sparse attention with KV in host memory; None if the KV is on the device."""


class CompilationConfig(Protocol):
    """The used fields of `vllm.config.CompilationConfig`."""

    @property
    def static_forward_context(self) -> Mapping[str, AttentionLayer]:
        """The model's layers by name. They are in the worker's process once the model is loaded."""
        ...


class EngineConfig(Protocol):
    """The used fields of `vllm.config.VllmConfig`."""

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
    """`vllm.config.VllmConfig` with the options for publishing KV events."""

    @property
    def cache_config(self) -> PrefixCacheConfig: ...
    @property
    def kv_events_config(self) -> EventsConfig | None: ...


class AttentionSpec(Protocol):
    """The used fields of `vllm.v1.kv_cache_interface.AttentionSpec`."""

    block_size: int
    head_size: int
    head_size_v: int
    num_head_slots: int | None
    """Number of head slots in a block; None if it is the number of the model's KV heads."""
    tokens_per_state: int
    """Number of tokens that one entry of the KV cache covers."""
    state_content_bytes: int | None
    """Bytes per head and token, for a backend that packs the elements of a key and a value; otherwise
    None."""


class WindowSpec(Protocol):
    """The used fields of `vllm.v1.kv_cache_interface.SlidingWindowSpec`."""

    sliding_window: int
    """Number of tokens that a token attends to, including itself."""
    extra_retained_tokens: int
    """Number of tokens before the window that vLLM also keeps, because draft tokens may be rejected."""


class LatentSpec(Protocol):
    """The used fields of `vllm.v1.kv_cache_interface.MLAAttentionSpec`."""

    block_size: int

    @property
    def cache_role(self) -> Enum: ...


class StateSpec(Protocol):
    """The used fields of `vllm.v1.kv_cache_interface.MambaSpec`."""

    block_size: int
    shapes: Sequence[tuple[int, ...]]
    """Shapes on one rank: the convolution's last inputs, then the recurrent state if there is one."""
    dtypes: Sequence[torch.dtype]
    mamba_type: Enum
    """The kind of layer, a `MambaAttentionBackendEnum`."""
    mamba_cache_mode: str
    """Mode that selects which recurrent states vLLM keeps, such as 'align'."""
    tp_replicated: bool
    """Whether every rank has the whole recurrent state, instead of a shard."""


class CacheGroup(Protocol):
    """The used fields of `vllm.v1.kv_cache_interface.KVCacheGroupSpec`."""

    layer_names: list[str]
    kv_cache_spec: AttentionSpec


class EngineCacheConfig(Protocol):
    """The used fields of `vllm.v1.kv_cache_interface.KVCacheConfig`."""

    @property
    def kv_cache_groups(self) -> Sequence[CacheGroup]: ...


class HashedCacheConfig(EngineCacheConfig, Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig` with the fields for block hashes and zeroing."""

    hash_block_size: int | None
    """Number of tokens that one block hash covers."""
    needs_kv_cache_zeroing: bool
    """Whether workers zero a block before a request gets it."""
