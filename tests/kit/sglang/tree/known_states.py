"""Fills SGLang's pool of recurrent states with numbers that identify layer, channel and prefix.

The expected state is computed for the whole model and then sharded as SGLang shards its weights: each
part of the convolution separately.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.known_bytes import PRIME

LAYERS = (1, 3, 4)
"""Numbers of the model's layers that have a recurrent state."""
KERNEL = 4
UTILS = "sglang.srt.configs.mamba_utils"

Held = dict[str, torch.Tensor]
"""Content of one state slot by part of the state; the first dimension is the layer."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """The shape of a model's recurrent states, for SGLang and for the expected content."""

    shape: Callable[[int], Any]
    """Function that returns SGLang's description of the shape, given the number of ranks."""
    parts: Sequence[int]
    """Channel counts of the convolution's parts in the whole model. Each part is sharded separately."""
    heads: int = 0
    matrix: tuple[int, int] = (1, 0)
    """Shape of each head's recurrent state."""
    inputs_first: bool = False
    """Shape of the convolution part of a slot: [input, channel] if True, [channel, input] if False."""

    def params(self, ranks: int) -> Any:
        """Return SGLang's parameters of the states on a rank of a group with `ranks` ranks."""
        dtype = here.of(UTILS, "Mamba2StateDType")(conv=torch.float32, temporal=torch.float32)
        kind = "KimiLinearCacheParams" if self.inputs_first else "Mamba2CacheParams"
        return here.of(UTILS, kind)(shape=self.shape(ranks), layers=list(LAYERS), dtype=dtype)

    def expected(self, number: int, rank: int, ranks: int) -> Held:
        """Return the expected content of a rank's state slot; `number` identifies the prefix."""
        conv = list[torch.Tensor]()
        for at, channels in enumerate(self.parts):
            mine = _spread(number, (len(LAYERS), channels, KERNEL - 1), 1 + at)
            conv.append(mine.chunk(ranks, dim=1)[rank])
        whole = torch.cat(conv, dim=1)
        held = {"conv": whole.transpose(1, 2) if self.inputs_first else whole}
        if self.heads:
            temporal = _spread(number, (len(LAYERS), self.heads, *self.matrix), 77)
            held["temporal"] = temporal.chunk(ranks, dim=1)[rank]
        return held


def held_by(pool: Any, slot: int) -> Held:
    held = {"conv": pool.mamba_cache.conv[0][:, slot]}
    if pool.mamba_cache.temporal.numel():
        held["temporal"] = pool.mamba_cache.temporal[:, slot]
    return held


def write(pool: Any, slot: int, held: Held) -> None:
    for name, tensor in held_by(pool, slot).items():
        tensor.copy_(held[name])


def _spread(number: int, shape: tuple[int, ...], part: int) -> torch.Tensor:
    """Return values that differ between elements, derived from the prefix's number and the part."""
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    return ((number * 37 + places * 11 + part * 1009) % PRIME).float()


def _mamba2(**model: Any) -> Callable[[int], Any]:
    def shape(ranks: int) -> Any:
        return here.of(UTILS, "Mamba2StateShape").create(
            tp_world_size=ranks, conv_kernel=KERNEL, intermediate_size=24, **model
        )

    return shape


def _short_convolution(ranks: int) -> Any:
    return _mamba2(n_groups=1, num_heads=ranks, head_dim=24, state_size=0)(ranks)


def _by_input(ranks: int) -> Any:
    return here.of(UTILS, "KimiLinearStateShape").create(
        tp_world_size=ranks, num_heads=4, head_dim=3, conv_kernel_size=KERNEL
    )


_DELTA_NET = _mamba2(
    n_groups=4, num_heads=8, head_dim=3, state_size=2, conv_shard_groups=[8, 8, 24]
)
_NOT_TOLD = _mamba2(n_groups=2, num_heads=8, head_dim=3, state_size=4)

STATES = {
    "delta net": StateKind(_DELTA_NET, (8, 8, 24), heads=8, matrix=(3, 2)),
    "short convolution": StateKind(_short_convolution, (24,)),
    "by input": StateKind(_by_input, (12, 12, 12), heads=4, matrix=(3, 3), inputs_first=True),
    "parts not told": StateKind(_NOT_TOLD, (24, 8, 8), heads=8, matrix=(3, 4)),
}
"""State shapes by name: those of Qwen3-Next, LFM2, Kimi Linear and Mamba 2."""
