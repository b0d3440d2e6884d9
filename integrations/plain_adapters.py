"""Recognises plain LoRA adapters: PEFT adapters that all engines apply as the same function.

Engines apply other adapters differently. vLLM 0.32 follows `use_rslora`, `rank_pattern` and
`alpha_pattern`, and ignores `target_modules`. SGLang 0.5.23 scales all modules by alpha / r and applies
only `target_modules`. SGLang fuses q, k and v (and gate and up) on the assumption that q (and gate)
exist. SGLang also reads every weight file in the folder.
"""

import json
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from .weights import WEIGHTS

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

HEADER_BYTES_MAX = 64 << 20
"""Safetensors headers longer than this number of bytes are not read."""

_READ_ALIKE = frozenset({"r", "lora_alpha", "target_modules"})

_NEUTRAL = frozenset(
    {
        # Ignore fields that describe only an adapter's origin and training.
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
        *("auto_mapping", "lora_dropout", "megatron_core"),
        # Ignore the group size, because only `use_qalora` uses it, and a plain adapter does not.
        "qalora_group_size",
    }
)
"""Fields of an adapter's configuration that never change KV, whatever their value."""

_AT_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Allow only these ways to initialise an adapter, because all other ways also change the model's own
    # weights.
    "init_lora_weights": (True, False, None),
}
"""Maps fields of an adapter's configuration to the values with which they do not change KV."""

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)"
    r"\.(?:self_attn\.([qkvo]_proj)|mlp\.(gate_proj|up_proj|down_proj))\.lora_([AB])\.weight"
)


def is_plain(folder: Path) -> bool:
    """Return whether every engine applies the adapter in a folder as the same function.

    Returns False for an adapter that cannot be read or that may be applied differently.
    """
    try:
        files = [each.name for each in folder.iterdir() if each.suffix in WEIGHTS]
        config = cast("object", json.loads((folder / CONFIG).read_bytes()))
        return (
            files == [TENSORS]
            and _is_plain_config(config)
            and _is_plain_layout(_shapes(folder / TENSORS), cast("dict[str, Any]", config))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_plain_config(config: object) -> bool:
    if not isinstance(config, dict) or "peft_type" not in config:
        return False
    found = cast("dict[str, Any]", config)
    numbers: list[Any] = [found.get(name) for name in ("r", "lora_alpha")]
    modules = found.get("target_modules")
    if not all(type(each) in {int, float} and each > 0 for each in numbers):
        return False
    if not isinstance(modules, list):
        return False
    return all(_is_neutral(name, worth) for name, worth in found.items())


def _is_neutral(name: str, worth: object) -> bool:
    """Return whether an adapter may be plain if this configuration field has this value.

    A field that this module does not know must be empty, 0, False or None.
    """
    if name in _READ_ALIKE | _NEUTRAL:
        return True
    if name in _AT_VALUES:
        return any(type(worth) is type(each) and worth == each for each in _AT_VALUES[name])
    return not worth


def _is_plain_layout(shapes: Mapping[str, list[int]], config: Mapping[str, Any]) -> bool:
    """Return whether an adapter has only complete modules of rank `r`, all among its target modules.

    A complete module has both LoRA matrices, A and B. A layer with any of q, k and v must have q and v.
    A layer with up must have gate.
    """
    layers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, shape in shapes.items():
        found = _TENSOR.fullmatch(name)
        if found is None or len(shape) != 2:
            return False
        layer, attention, feed_forward, side = found.groups()
        module = attention or feed_forward
        if module not in config["target_modules"] or shape[side == "B"] != config["r"]:
            return False
        layers[layer][module].add(side)
    return bool(layers) and all(map(_is_whole, layers.values()))


def _is_whole(modules: Mapping[str, set[str]]) -> bool:
    attends = modules.keys() & {"q_proj", "k_proj", "v_proj"}
    return (
        all(sides == {"A", "B"} for sides in modules.values())
        and (not attends or {"q_proj", "v_proj"} <= attends)
        and ("up_proj" not in modules or "gate_proj" in modules)
    )


def _shapes(path: Path) -> dict[str, list[int]]:
    """Return the tensor shapes of a safetensors file; raise `ValueError` for any other file."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8 or (length := struct.unpack("<Q", start)[0]) > HEADER_BYTES_MAX:
            raise ValueError(f"{path} is not a safetensors file")
        header = cast("object", json.loads(file.read(length)))
    tensors = cast("dict[str, Any]", header if isinstance(header, dict) else {})
    tensors.pop("__metadata__", None)
    return {name: list(each["shape"]) for name, each in tensors.items()}
