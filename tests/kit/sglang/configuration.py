"""Objects with the fields of SGLang's configuration that the plug-in reads, for tests without SGLang.

Most classes have the `__module__` and `__qualname__` of a class of SGLang, because the plug-in finds
settings by these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.integrations.sglang.identity.kv_identity import Resolved

FIELDS: Mapping[str, object] = {
    "device.device": "cuda",
    "device.random_seed": 1,
    "exec.comm.enable_symm_mem": False,
    "exec.dllm.dllm_algorithm_config": None,
    "exec.graph.cuda_graph_config": None,
    "exec.kernel.attention_backend": "fa3",
    "exec.moe.kt_weight_path": None,
    "memory.hicache_ratio": 2.0,
    "mm.mm_process_config": None,
    "model.checkpoint_engine_wait_weights_before_ready": False,
    "model.decrypted_config_file": None,
    "model.decrypted_draft_config_file": None,
    "model.dtype": "bfloat16",
    "model.kv_cache_dtype": "auto",
    "model.load_format": "auto",
    "model.model_path": "org/model",
    "model.modelopt_checkpoint_restore_path": None,
    "model.quantization": None,
    "model.quantization_param_path": None,
    "model.revision": None,
    "model.rl_quant_profile": None,
    "model.weight_cache_mode": "off",
    "parallel.nccl_port": 29500,
    "parallel.tp_size": 2,
    "schedule.mem_fraction_static": 0.88,
    "serving.port": 30000,
    "spec.speculative_algorithm": None,
    "spec.speculative_draft_load_format": None,
    "spec.speculative_draft_model_path": None,
    "spec.speculative_draft_model_revision": None,
    "spec.speculative_token_map": None,
    "spec.uno_lora_path": None,
}


@dataclass
class Pretrained:
    """The Hugging Face configuration of a model."""

    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    def to_dict(self) -> dict[str, object]:
        return {
            "rope_parameters": {**self.rope_parameters, "type": self.rope_parameters["rope_type"]},
            "context_len": 4096,
            "hidden_size": 64,
        }


@dataclass
class Graphs:
    """The batch sizes with a CUDA graph, for prefill or for decode."""

    __module__ = "sglang.srt.model_executor.cuda_graph_config"
    __qualname__ = "PhaseConfig"

    backend: str = "full"
    bs: list[int] = field(default_factory=lambda: [1, 2, 4])


class Model:
    """SGLang's resolved model configuration."""

    __module__ = "sglang.srt.configs.model_config"
    __qualname__ = "ModelConfig"

    def __init__(self, **attributes: object) -> None:
        self.model_path = "org/model"
        self.context_len = 4096
        self.dtype = torch.bfloat16
        self.hf_config = Pretrained()
        vars(self).update(attributes)


def engine(
    *,
    version: str = "0.5.23",
    model: Model | None = None,
    environment: Mapping[str, object] | None = None,
    **changes: object,
) -> Resolved:
    """Return an engine's configuration; `changes` are fields such as `model__dtype="float16"`.

    A change may also add a field that is not in `FIELDS`, as if a newer SGLang had added it.
    """
    fields: dict[str, dict[str, object]] = {}
    given = {name.replace("__", "."): value for name, value in changes.items()}
    for path, value in (dict(FIELDS) | given).items():
        namespace, _, name = path.rpartition(".")
        fields.setdefault(namespace, {})[name] = value
    declared = {path.rpartition(".")[2]: value for path, value in FIELDS.items()}
    return Resolved(version, fields, model or Model(), environment or {}, declared)
