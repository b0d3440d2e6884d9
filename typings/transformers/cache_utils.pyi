from typing import Any

import torch

from . import PreTrainedConfig

class DynamicLayer:
    keys: torch.Tensor | None
    values: torch.Tensor | None
    is_initialized: bool
    is_sliding: bool
    dtype: torch.dtype
    device: torch.device
    def __init__(self) -> None: ...
    def get_seq_length(self) -> int: ...

class DynamicSlidingWindowLayer(DynamicLayer):
    sliding_window: int

class Cache:
    layers: list[Any]
    def __init__(self, *, layers: list[Any]) -> None: ...
    def get_seq_length(self, layer_idx: int = 0) -> int: ...
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *arguments: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

class DynamicCache(Cache):
    def __init__(self, *, config: PreTrainedConfig | None = None) -> None: ...
