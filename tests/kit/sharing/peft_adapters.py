"""LoRA adapters in PEFT's format, and the identities that the vLLM and SGLang plug-ins give them."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.integrations.sglang.identity.adapters import Adapters as SglangAdapters
from lockstep.integrations.vllm.adapters import adapter_weights, loaded
from lockstep.integrations.weights import FileDigests
from tests.kit.vllm.sent_requests import Adapter

RANK, HIDDEN = 4, 8
SAVED_BY_PEFT: Mapping[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 16,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "base_model_name_or_path": "m",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "lora_dropout": 0.1,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "megatron_core": "megatron.core",
    "peft_version": "0.18.0",
    "qalora_group_size": 16,
}
QUERIES_AND_VALUES = ("self_attn.q_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Loaded:
    """SGLang's record of a loaded adapter: its name and path."""

    lora_name: str
    lora_path: str


def write_adapter(
    folder: Path,
    modules: Iterable[str] = QUERIES_AND_VALUES,
    *,
    rank: int = RANK,
    prefix: str = "base_model.model.model.layers.0",
    sides: str = "AB",
    **fields: Any,
) -> Path:
    """Write an adapter for these modules, with these fields in its configuration; return its folder."""
    shapes = {"A": [rank, HIDDEN], "B": [HIDDEN, rank]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in [f"{prefix}.{each}.lora_{side}.weight" for each in modules for side in sides]:
        end = at + 4 * rank * HIDDEN
        header[name] = {"dtype": "F32", "shape": shapes[name[-8]], "data_offsets": [at, end]}
        at = end
    data = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(data)) + data + bytes(at)
    )
    named = sorted({each.rsplit(".", 1)[-1] for each in modules})
    config = {**SAVED_BY_PEFT, "target_modules": named, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def under_vllm(
    folder: Path, *, options: str = "", versions: Mapping[str, str] | None = None
) -> str:
    """Return the identity that vLLM's integration computes for an adapter."""
    digests = FileDigests(folder.parent / "digests.json")
    found = adapter_weights(digests, versions or {}, options).identify(
        loaded(Adapter("a", str(folder)))
    )
    assert found is not None
    return found


def under_sglang(
    folder: Path,
    *,
    options: str = "",
    shares: bool = True,
    versions: Mapping[str, str] | None = None,
) -> str:
    """Return the identity that SGLang's integration computes for an adapter."""
    digests = FileDigests(folder.parent / "digests.json")
    held = {"7f": Loaded("a", str(folder))}
    known = SglangAdapters(
        held, digests, versions or {}, options=options, shares=shares, where="the config"
    )
    found = known.identify("7f")
    assert found is not None
    return found
