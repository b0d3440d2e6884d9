"""How vLLM 0.32's attention backends arrange keys and values in their KV blocks.

All backends report blocks of shape [heads, tokens, elements], with a token's key and value in one row.
The CPU backends differ from this report: they store all keys of a head before its values, in an order
that depends on the CPU's instruction set.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class AttentionBackend(Protocol):
    """The class `vllm.v1.attention.backend.AttentionBackend` itself, not an instance of it."""

    def get_name(self) -> str: ...


class AttentionLayer(Protocol):
    """`vllm.model_executor.layers.attention.Attention`; on a CPU it has `isa`, the instruction set."""

    @property
    def attn_backend(self) -> AttentionBackend: ...


KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""(keys, values) as views [blocks, heads, tokens, elements]; tokens and elements may be several axes
each."""

_TILE = 16


def form_of(layer: AttentionLayer) -> str:
    """Return the name of a layer's block format: the backend, and the instruction set of a CPU."""
    name = layer.attn_backend.get_name()
    isa = getattr(layer, "isa", None)
    return name if isa is None else f"{name} {isa}"


def keys_and_values(form: str, blocks: torch.Tensor, head_size: int) -> KeysAndValues | None:
    """Return (keys, values) as views of `blocks`; None if the block format is unknown.

    `blocks` is one layer's tensor as vLLM has registered it, [blocks, heads, tokens, elements].
    """
    divide = _FORMS.get(form)
    return None if divide is None else divide(blocks, head_size)


def _side_by_side(blocks: torch.Tensor, head_size: int) -> KeysAndValues:
    return blocks[..., :head_size], blocks[..., head_size:]


def _keys_in_columns(blocks: torch.Tensor, head_size: int) -> KeysAndValues | None:
    """Split blocks that store keys element by element and values token by token."""
    halves = _halves(blocks, head_size)
    if halves is None:
        return None
    keys, values = halves
    tokens = blocks.shape[2]
    shape = (*blocks.shape[:2], tokens, head_size)
    return keys.view(*shape[:2], head_size, tokens).transpose(2, 3), values.view(shape)


def _in_tiles(blocks: torch.Tensor, head_size: int) -> KeysAndValues | None:
    """Split blocks that have keys in tiles of 16 tokens, and values in tiles of 16 elements."""
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
    """Return (keys, values), each [blocks, heads, elements of all tokens].

    Returns None if `blocks` has other sizes or strides than this format requires.
    """
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
"""Maps block formats, as named by `form_of`, to functions that split blocks into keys and values."""
