"""Objects with the attributes of vLLM's configuration that the plug-in reads, for tests without vLLM.

Most classes have the `__module__` and `__qualname__` of a class of vLLM, because the plug-in finds
settings by these names.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass
class Transfer:
    """vLLM's configuration of its KV connector."""

    kv_load_failure_policy: str = "recompute"
    engine_id: str | None = None
    kv_connector: str | None = "LockstepConnector"
    is_kv_producer: bool = True
    is_kv_consumer: bool = True
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Parallel:
    __module__ = "vllm.config.parallel"
    __qualname__ = "ParallelConfig"

    tensor_parallel_size: int = 2
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    distributed_executor_backend: object = "external_launcher"
    rank: int = 0
    master_port: int = 29500
    worker_cls: str = "auto"
    dcp_q_replicate: bool | None = None
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.world_size = self.tensor_parallel_size


@dataclass
class Pretrained:
    """The Hugging Face configuration of a model."""

    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    other_fields: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> dict[str, object]:
        return {"rope_parameters": self.rope_parameters, "hidden_size": 64, **self.other_fields}


def long_rope() -> Pretrained:
    """Return the configuration of a model whose positions depend on the maximum prompt length."""
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    return Pretrained({"rope_type": "longrope", **factors})


@dataclass
class Model:
    __module__ = "vllm.config.model"
    __qualname__ = "ModelConfig"

    model: str = "org/model"
    model_weights: str = ""
    revision: str | None = None
    seed: int = 0
    tokenizer: str = "org/model"
    dtype: object = torch.float32
    quantization: str | None = None
    max_model_len: int = 4096
    hf_config: Pretrained = field(init=False, default_factory=Pretrained)


@dataclass
class Kept:
    __module__ = "vllm.config.cache"
    __qualname__ = "CacheConfig"

    cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    next_field: int = 0
    """A field that the plug-in does not know, as if a newer vLLM had added it."""


@dataclass
class Load:
    __module__ = "vllm.config.load"
    __qualname__ = "LoadConfig"

    load_format: str = "auto"
    use_tqdm_on_load: bool = True


@dataclass
class Lora:
    __module__ = "vllm.config.lora"
    __qualname__ = "LoRAConfig"

    lora_dtype: object = "auto"


@dataclass
class Speculative:
    __module__ = "vllm.config.speculative"
    __qualname__ = "SpeculativeConfig"

    draft_model_config: Model | None = None
    draft_load_config: Load | None = None


@dataclass
class Attention:
    __module__ = "vllm.config.attention"
    __qualname__ = "AttentionConfig"

    hisparse_config: object = None


@dataclass
class Compilation:
    """vLLM's CompilationConfig, in which the plug-in finds the model's layers."""

    __module__ = "vllm.config.compilation"
    __qualname__ = "CompilationConfig"

    static_forward_context: dict[str, Any] = field(init=False, default_factory=dict[str, Any])


@dataclass
class Engine:
    __module__ = "vllm.config.vllm"
    __qualname__ = "VllmConfig"

    parallel_config: Parallel = field(default_factory=Parallel)
    kv_transfer_config: Transfer | None = field(default_factory=Transfer)
    ec_transfer_config: Any = None
    model_config: Model = field(default_factory=Model)
    cache_config: Kept = field(default_factory=Kept)
    load_config: Load = field(default_factory=Load)
    lora_config: Lora | None = None
    speculative_config: Speculative | None = None
    compilation_config: Compilation = field(default_factory=Compilation)
    attention_config: Attention = field(default_factory=Attention)
    additional_config: object = None
    instance_id: str = "1"

    @property
    def use_v2_model_runner(self) -> bool:
        """Return whether the engine's workers use vLLM's second model runner."""
        return False


class NewerEngine(Engine):
    """An engine whose workers use vLLM's second model runner."""

    @property
    def use_v2_model_runner(self) -> bool:
        return True


def of_model(hf_config: Pretrained | None = None, **changes: Any) -> Engine:
    model = replace(Model(), **changes)
    model.hf_config = hf_config or model.hf_config
    return Engine(model_config=model)
