"""What SGLang's torch-native attention lacks for sliding windows: it reads where it did not write.

It writes a windowed layer's KV to the slot of the windows' own pool, and reads it by the slot of the
full pool, so stock SGLang answers otherwise each time. With this it reads where it wrote.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Rows:
    """Stands for the table of requests, with the slots of another pool."""

    req_to_token: torch.Tensor


def register() -> None:
    """Let windowed layers look slots up in their own pool; SGLang calls it in each process."""
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
    # What has left the window has no slot there; the mask hides what is read in its place.
    return own.clamp(min=0).view_as(slots).to(slots.dtype)
