"""Fills SGLang's device pools with numbers that identify token, layer, head and prefix.

A token's number depends on all tokens before it, so that a test detects a page of another prefix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.kit.sglang.tree import here

HEADS = 4
LAYERS = 3
PRIME = 8191
"""Upper bound of the numbers that identify tokens. float32 represents numbers below it exactly."""
INDEX_BYTES = 128
"""Bytes of one token's index key in DeepSeek's sparse attention, without the scale's four bytes."""

Held = Mapping[str, torch.Tensor]
"""Content of a pool's slots by column and layer; each tensor has one row per token."""


def numbers_of(tokens: Sequence[int]) -> torch.Tensor:
    """Return a number for each token that depends on the token and all tokens before it."""
    numbers, running = [], 1
    for token in tokens:
        running = (running * 31 + token + 1) % PRIME
        numbers.append(running)
    return torch.tensor(numbers, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of KV pool of SGLang: how to create, read and write it, and its expected content."""

    page_tokens: int
    make: Callable[[int, int], Any]
    """Function that creates a pool. Its arguments are the number of slots and the number of ranks."""
    held: Callable[[Any, torch.Tensor], Held]
    """Function that returns the content of a pool's slots, as views or copies."""
    expected: Callable[[torch.Tensor, int, int], Held]
    """Function that returns the expected content, given the tokens' numbers, the rank and the group's
    size."""
    write: Callable[[Any, torch.Tensor, Held], None]


def _attention(page_tokens: int) -> Kind:
    def make(slots: int, ranks: int) -> Any:
        return here.of("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool")(
            size=slots,
            page_size=page_tokens,
            dtype=torch.float32,
            head_num=HEADS // ranks,
            head_dim=4,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )

    def expected(numbers: torch.Tensor, rank: int, ranks: int) -> Held:
        heads = torch.arange(HEADS // ranks) + rank * (HEADS // ranks)
        return {
            f"{side} {layer}": _spread(numbers, heads, 4, 2 * layer + (side == "v")).float()
            for side in ("k", "v")
            for layer in range(LAYERS)
        }

    return Kind(page_tokens, make, _held_by(_sides), expected, _write_by(_sides))


def _latent(page_tokens: int) -> Kind:
    def make(slots: int, ranks: int) -> Any:
        return here.of("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool")(
            size=slots,
            page_size=page_tokens,
            dtype=torch.float32,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )

    def expected(numbers: torch.Tensor, rank: int, ranks: int) -> Held:
        return _latent_rows(numbers, 12, torch.float32, PRIME)

    return Kind(page_tokens, make, _held_by(_rows), expected, _write_by(_rows))


def _sparse(dtype: torch.dtype, width: int, *, skipped: int | None = None) -> Kind:
    """Return the kind of pool for DeepSeek's sparse attention; layer `skipped` has no index keys."""

    def make(slots: int, ranks: int) -> Any:
        return here.of("sglang.srt.mem_cache.memory_pool", "DSATokenToKVPool")(
            size=slots,
            page_size=64,
            kv_lora_rank=8,
            dtype=dtype,
            qk_rope_head_dim=4,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=INDEX_BYTES,
            enable_memory_saver=False,
            kv_cache_dim=width,
            index_buf_size=slots,
            skip_topk_layers=[layer == skipped for layer in range(LAYERS)],
        )

    def expected(numbers: torch.Tensor, rank: int, ranks: int) -> Held:
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        index = {
            f"index {layer}": _spread(numbers, torch.arange(1), INDEX_BYTES + 4, 7 + layer, 251).to(
                torch.uint8
            )[:, 0]
            for layer in range(LAYERS)
            if layer != skipped
        }
        return {**_latent_rows(numbers, width, stored, 251), **index}

    def held(pool: Any, slots: torch.Tensor) -> Held:
        return {**_held_by(_rows)(pool, slots), **_index_of(pool, slots)}

    def write(pool: Any, slots: torch.Tensor, rows: Held) -> None:
        _write_by(_rows)(pool, slots, rows)
        pages, at = slots // 64, slots % 64
        for layer, buffer in enumerate(pool.index_k_with_scale_buffer):
            if len(buffer):
                keys, scales = _parts(buffer)
                keys[pages, at] = rows[f"index {layer}"][:, :INDEX_BYTES]
                scales[pages, at] = rows[f"index {layer}"][:, INDEX_BYTES:]

    return Kind(64, make, held, expected, write)


def _index_of(pool: Any, slots: torch.Tensor) -> Held:
    found: dict[str, torch.Tensor] = {}
    for layer, buffer in enumerate(pool.index_k_with_scale_buffer):
        if len(buffer):
            keys, scales = _parts(buffer)
            where = slots // 64, slots % 64
            found[f"index {layer}"] = torch.cat([keys[where], scales[where]], dim=1)
    return found


def _parts(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the index keys and of their scales; in a page, all keys precede all scales."""
    split = 64 * INDEX_BYTES
    pages = len(buffer)
    return buffer[:, :split].view(pages, 64, -1), buffer[:, split:].view(pages, 64, -1)


def _latent_rows(numbers: torch.Tensor, width: int, dtype: torch.dtype, most: int) -> Held:
    return {
        f"latent {layer}": _spread(numbers, torch.arange(1), width, layer, most).to(dtype)
        for layer in range(LAYERS)
    }


def _spread(
    numbers: torch.Tensor, heads: torch.Tensor, elements: int, tensor: int, most: int = PRIME
) -> torch.Tensor:
    """Return values [token, head, element] below `most` that differ by head, element and `tensor`."""
    heads, spread = heads[None, :, None], torch.arange(elements)[None, None, :]
    return (numbers[:, None, None] * 37 + heads * 101 + spread * 7 + tensor * 1009) % most


def _sides(pool: Any) -> dict[str, torch.Tensor]:
    layers = {f"k {at}": each for at, each in enumerate(pool.k_buffer)}
    return layers | {f"v {at}": each for at, each in enumerate(pool.v_buffer)}


def _rows(pool: Any) -> dict[str, torch.Tensor]:
    return {f"latent {at}": each for at, each in enumerate(pool.kv_buffer)}


def _held_by(tensors: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[..., Held]:
    def held(pool: Any, slots: torch.Tensor) -> Held:
        return {name: each[slots] for name, each in tensors(pool).items()}

    return held


def _write_by(tensors: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[..., None]:
    def write(pool: Any, slots: torch.Tensor, rows: Held) -> None:
        for name, each in tensors(pool).items():
            each[slots] = rows[name]

    return write


KINDS = {
    "attention": _attention(4),
    "attention, long pages": _attention(16),
    "a token to a page": _attention(1),
    "latent": _latent(4),
    "sparse": _sparse(torch.bfloat16, 12),
    "sparse, a layer without index": _sparse(torch.bfloat16, 12, skipped=1),
    "sparse, packed": _sparse(torch.float8_e4m3fn, 20),
}
"""The kinds of KV pools by name."""
