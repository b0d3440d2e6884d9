"""CPU kernels in plain torch for models with short convolutions; SGLang has only Triton kernels.

The kernels are made for LFM2, whose only state is the last inputs of a causal convolution.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    conv_states: torch.Tensor,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve concatenated prompts `x` [channels, tokens], each from its own initial state."""
    assert activation is None
    starts, kept = [int(start) for start in query_start_loc], conv_states.shape[-1]
    outputs = list[torch.Tensor]()
    for at, slot in enumerate(cache_indices):
        before = conv_states[slot] * bool(has_initial_state[at])
        inputs = torch.cat([before.to(x.dtype), x[:, starts[at] : starts[at + 1]]], dim=-1)
        outputs.append(_convolved(inputs[None], weight, bias)[0])
        conv_states[slot] = inputs[:, -kept:]
    return torch.cat(outputs, dim=-1)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    conv_state_indices: torch.Tensor,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve one token of each request, starting from the request's state.

    `x` has shape [requests, channels].
    """
    assert activation is None
    inputs = torch.cat([conv_state[conv_state_indices].to(x.dtype), x[:, :, None]], dim=-1)
    conv_state[conv_state_indices] = inputs[:, :, 1:]
    return _convolved(inputs, weight, bias)[:, :, 0]


def register() -> None:
    """Make LFM2 use these kernels; SGLang calls this in each of its processes."""
    kernels: Any = _Kernels("sgl_kernel.mamba")
    sys.modules[kernels.__name__] = kernels
    setattr(torch.ops, "sgl_kernel", kernels)  # noqa: B010 - its type says that it has none.
    lfm2: Any = import_module("sglang.srt.models.lfm2")
    lfm2.causal_conv1d_fn = causal_conv1d_fn
    lfm2.causal_conv1d_update = causal_conv1d_update


class _Kernels(ModuleType):
    """A substitute for the module `sgl_kernel.mamba`; it forwards attributes to `sgl_kernel`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("sgl_kernel"), name)


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=len(weight))
