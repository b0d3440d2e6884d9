"""Where a backend of vLLM has keys and values in its blocks: read in vLLM 0.32, backend by backend.

The blocks of every backend are [heads, tokens, elements] by name, with the elements of a key and of a
value in one row. Most backends mean it so. Those for CPUs arrange a head's part of a block as their
kernels read it: the keys of all tokens before the values, and both by instruction set.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class AttentionBackend(Protocol):
    """`vllm.v1.attention.backend.AttentionBackend`, the class itself."""

    def get_name(self) -> str: ...


class AttentionLayer(Protocol):
    """`vllm.model_executor.layers.attention.Attention`; on a CPU it also has an `isa`."""

    @property
    def attn_backend(self) -> AttentionBackend: ...


KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Views [blocks, heads, tokens, elements]; tokens and elements may be several axes each."""

_TILE = 16


def form_of(layer: AttentionLayer) -> str:
    """Return the name of how a layer's blocks are arranged."""
    name = layer.attn_backend.get_name()
    isa = getattr(layer, "isa", None)
    return name if isa is None else f"{name} {isa}"


def keys_and_values(form: str, blocks: torch.Tensor, head_size: int) -> KeysAndValues | None:
    """Return the keys and the values in `blocks`, nothing copied; None if their places are not known.

    `blocks` is one layer's tensor as vLLM has registered it, [blocks, heads, tokens, elements].
    """
    divide = _FORMS.get(form)
    return None if divide is None else divide(blocks, head_size)


def _side_by_side(blocks: torch.Tensor, head_size: int) -> KeysAndValues:
    return blocks[..., :head_size], blocks[..., head_size:]


def _keys_in_columns(blocks: torch.Tensor, head_size: int) -> KeysAndValues | None:
    """An element of all keys, then the next one; values as they are."""
    halves = _halves(blocks, head_size)
    if halves is None:
        return None
    keys, values = halves
    tokens = blocks.shape[2]
    shape = (*blocks.shape[:2], tokens, head_size)
    return keys.view(*shape[:2], head_size, tokens).transpose(2, 3), values.view(shape)


def _in_tiles(blocks: torch.Tensor, head_size: int) -> KeysAndValues | None:
    """Pairs of elements of 16 keys, and pairs of tokens of 16 elements of values."""
    halves = _halves(blocks, head_size)
    if halves is None or blocks.dtype is not torch.bfloat16 or head_size % _TILE:
        return None
    keys, values = halves
    tokens, of_heads = blocks.shape[2], blocks.shape[:2]
    return (
        keys.view(*of_heads, tokens // _TILE, head_size // 2, _TILE, 2).transpose(3, 4),
        values.view(*of_heads, head_size // _TILE, tokens // 2, _TILE, 2).permute(0, 1, 3, 5, 2, 4),
    )


def _halves(blocks: torch.Tensor, head_size: int) -> KeysAndValues | None:
    """Return a head's keys and its values as flat rows, if it has as much of each; else None."""
    tokens, width = blocks.shape[2:]
    if width != 2 * head_size or blocks.element_size() < 2 or blocks[0, 0].stride() != (width, 1):
        return None
    rows = blocks.flatten(2)
    return rows[..., : tokens * head_size], rows[..., tokens * head_size :]


_FORMS: Mapping[str, Callable[[torch.Tensor, int], KeysAndValues | None]] = {
    "FLASH_ATTN": _side_by_side,
    "FLASHINFER": _side_by_side,
    "TRITON_ATTN": _side_by_side,
    "FLEX_ATTENTION": _side_by_side,
    "CPU_ATTN vec": _keys_in_columns,
    "CPU_ATTN vec16": _keys_in_columns,
    "CPU_ATTN amx": _in_tiles,
}
"""By the name of the backend and of the instruction set."""
