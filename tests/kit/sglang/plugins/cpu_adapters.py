"""Makes SGLang's LoRA adapters work on a CPU, where small tensors cannot be pinned.

Requires `lora_backend="torch_native"`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

MAKERS = ("empty", "full", "ones", "tensor", "zeros")


def register() -> None:
    """Make torch ignore `pin_memory`; SGLang calls this in each of its processes."""
    for name in MAKERS:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", _itself)  # noqa: B010 - its type says that it is another.


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made


def _itself(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor
