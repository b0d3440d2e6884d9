"""Fixes SGLang's torch-native attention for sliding windows, which reads the wrong slots.

Stock SGLang writes a windowed layer's KV to a slot of the window pool, but reads with the slot number
of the full pool. This number selects another slot of the window pool. Stock SGLang's answers therefore
vary between runs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Rows:
    """A substitute for SGLang's request table, with slot numbers of the window pool."""

    req_to_token: torch.Tensor


def register() -> None:
    """Make windowed layers read the window pool's slots; SGLang calls this in each process."""
    module: Any = import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = module.TorchNativeAttnBackend
    backend.forward_extend = _reading_where_written(backend.forward_extend)
    backend.forward_decode = _reading_where_written(backend.forward_decode)


def _reading_where_written(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def translated(
        backend: Any, query: Any, key: Any, value: Any, layer: Any, *arguments: Any, **options: Any
    ) -> Any:
        full = backend.req_to_token_pool
        pool = backend.token_to_kv_pool
        if backend.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
            backend.req_to_token_pool = _Rows(_own_slots(pool, full.req_to_token))
        try:
            return forward(backend, query, key, value, layer, *arguments, **options)
        finally:
            backend.req_to_token_pool = full

    return translated


def _own_slots(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    own: torch.Tensor = pool.translate_loc_from_full_to_swa(slots.flatten())
    # A token outside the window has no slot. Read slot 0 for it, because the mask hides the value.
    return own.clamp(min=0).view_as(slots).to(slots.dtype)
