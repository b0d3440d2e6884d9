"""What SGLang's adapters lack on a CPU: small tensors that are to be pinned, which GPUs need.

With it adapters are served by `lora_backend="torch_native"`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

MAKERS = ("empty", "full", "ones", "tensor", "zeros")


def register() -> None:
    """Let tensors be made that are not pinned; SGLang calls it in each of its processes."""
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
