"""Writes tiny models with windows, recurrent states or image inputs, with random weights."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.kit.tiny_models import SMALL, write

WINDOW = 128
IMAGE_TOKEN, IMAGE_PIXELS = 4, 112

_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_WINDOWED, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


def make_gpt_oss(folder: Path) -> None:
    """Write a four-layer gpt-oss with experts; every other layer has a sliding window."""
    write(
        folder,
        "gpt_oss",
        layer_types=[_WINDOWED, _FULL] * 2,
        head_dim=32,
        sliding_window=WINDOW,
        **_EXPERTS,
    )


def make_qwen_next(folder: Path) -> None:
    """Write a four-layer Qwen3-Next with experts; every other layer has a recurrent state."""
    write(
        folder,
        "qwen3_next",
        layer_types=[_LINEAR, _FULL] * 2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )


MAKERS: Mapping[str, Callable[[Path], None]] = {
    "gpt-oss": make_gpt_oss,
    "qwen-next": make_qwen_next,
}


def make_llava(folder: Path) -> None:
    """Write a LLaVA with two language and three vision layers; an image is 64 tokens of id 4."""
    transformers: Any = import_module("transformers")
    tokenizers: Any = import_module("tokenizers")
    safetensors: Any = import_module("safetensors.torch")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    language = transformers.LlamaConfig(
        **{**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=IMAGE_PIXELS,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=language, image_token_index=IMAGE_TOKEN
    )
    model = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    # Prefix the names of the vision tower's weights as vLLM 0.32 expects. Transformers 5 omits the
    # prefix.
    renamed = {
        re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): each
        for name, each in safetensors.load_file(weights).items()
    }
    safetensors.save_file(renamed, weights, metadata={"format": "pt"})
    named = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<image>": IMAGE_TOKEN}
    words = named | {f"w{each}": each for each in range(len(named), SMALL["vocab_size"])}
    roles = dict(zip(("pad", "bos", "eos", "unk", "image"), named, strict=True))
    special: dict[str, Any] = {f"{role}_token": each for role, each in roles.items()}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, special["unk_token"]))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    image: dict[str, str] = {"image_token": special.pop("image_token")}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, extra_special_tokens=image, **special
    )
    pixels = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": IMAGE_PIXELS}, crop_size=pixels
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        **image,
    ).save_pretrained(folder)
