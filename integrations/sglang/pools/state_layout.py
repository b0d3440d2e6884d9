"""SGLang's pool of recurrent states as Lockstep pages: one slot is one page of the state pool.

For each layer with a state, a slot holds the last inputs of a convolution (one row per channel) and the
recurrent state (one matrix per head). A convolution's channels are queries, keys and values, in this
order. Ranks split queries, keys and values separately, so each of these parts is a separate column. All
columns have the same number of units, so that ranks of any TP size can find their units.

If ranks split the state in an unknown or uneven way, a page is one rank's whole state. Its column names
then include the TP size, so that groups of another TP size find no such page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from ....errors import ConfigError
from ....page_format.page_layout import Column
from ....ranks.executor.engine_pages import dtype_name
from ..engine.contract import StateBuffers

UNITS_MAX = 16
"""Maximum number of units (heads of a column) per state; smaller units would be slow to copy."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One rank's share of a part of the recurrent state; ranks split each part by channels."""

    name: str
    layers: Sequence[torch.Tensor]
    """One tensor per layer, each [slots, channels, elements ...]."""

    @property
    def channels(self) -> int:
        """Number of channels that this part of the state has on this rank."""
        return self.layers[0].shape[1]

    def column(self, heads: int, tp_size: int) -> tuple[Column, list[torch.Tensor]]:
        """Return (column, tensors) of this part; the column has `heads` units over all ranks.

        Each tensor is a view [slots, units of this rank, 1, elements] of one layer.
        """
        mine = heads // tp_size
        column = Column(
            name=self.name,
            layers=len(self.layers),
            heads=heads,
            elements=self.layers[0][0].numel() // mine,
            dtype=dtype_name(self.layers[0].dtype),
        )
        return column, [self._in_units(each, mine) for each in self.layers]

    def _in_units(self, tensor: torch.Tensor, units: int) -> torch.Tensor:
        try:
            return tensor.view(len(tensor), units, 1, -1)
        except RuntimeError as error:
            raise ConfigError(
                f"the model's states {self.name!r} are {list(tensor.shape)} with strides"
                f" {tensor.stride()}; Lockstep supports contiguous ranges of channels only; run"
                " without --radix-cache-backend"
            ) from error


def state_columns(pool: Any, tp_size: int) -> dict[Column, list[torch.Tensor]]:
    """Return this rank's tensors, by column of a state page.

    Raises `ConfigError` for an unsupported state pool.
    """
    [info] = pool.get_device_pool_infos()
    buffers: StateBuffers = info.buffer_info
    kind = type(pool).__name__
    if kind != "MambaPool" or buffers.extra_checkpoint_buffers:
        beside = " with other states" if buffers.extra_checkpoint_buffers else ""
        raise ConfigError(
            f"the model's states are in a {kind}{beside}; Lockstep supports MambaPool alone; run"
            " without --radix-cache-backend"
        )
    parts = _divided(buffers, pool.conv_shard_groups, pool.conv_slice_axis, tp_size)
    heads = _units(parts, tp_size) if parts else 0
    if not parts or heads % tp_size:
        heads, parts = tp_size, list(_undivided(buffers, tp_size))
    return dict(part.column(heads, tp_size) for part in parts)


def _units(parts: Sequence[_Part], tp_size: int) -> int:
    """Return the number of units of every column; it is the same at every TP size."""
    common = gcd(*(part.channels * tp_size for part in parts))
    return max(units for units in range(1, UNITS_MAX + 1) if not common % units)


def _divided(
    buffers: StateBuffers, groups: Sequence[int] | None, axis: int, tp_size: int
) -> list[_Part]:
    """Return the parts of a state that ranks split evenly; empty if the split is unknown or uneven.

    `groups` has the number of channels of each part of a convolution in the whole model. `axis` is 0 if
    the axes of a slot are [channels, inputs], 1 if they are [inputs, channels].
    """
    temporal, convolutions = _temporal(buffers), _convolutions(buffers)
    if not convolutions:
        return temporal
    if groups is None and len(convolutions) == 1 and not temporal:
        # A short convolution without a recurrent state has one part, with all channels.
        groups = [convolutions["conv0"].shape[2 + axis] * tp_size]
    if groups is None or any(count % tp_size for count in groups):
        return []
    parts = list[_Part]()
    for name, conv in convolutions.items():
        counts = [count // tp_size for count in groups]
        if conv.ndim != 4 or conv.shape[2 + axis] != sum(counts):
            # Return no parts if the convolution's channels are not those in `groups`. This happens with
            # more ranks than heads, because ranks then hold copies of a head.
            return []
        begin = 0
        for number, count in enumerate(counts):
            layers = list(_channels(conv, axis, begin, begin + count))
            parts.append(_Part(f"{name}.{number}", layers))
            begin += count
    return [*parts, *temporal]


def _channels(conv: torch.Tensor, axis: int, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Yield the channels `begin` to `end` of each layer as tensors [slots, channels, ...]."""
    for layer in conv:
        if axis == 0:
            yield layer[:, begin:end]
        else:
            # Yield a separate tensor for each input, because with this order of axes only the channels
            # of one input are contiguous.
            yield from (layer[:, at, begin:end] for at in range(layer.shape[1]))


def _convolutions(buffers: StateBuffers) -> dict[str, torch.Tensor]:
    """Return the tensors with the convolutions' last inputs, by name; empty without convolutions."""
    return {f"conv{at}": conv for at, conv in enumerate(buffers.conv) if conv.numel()}


def _temporal(buffers: StateBuffers) -> list[_Part]:
    """Return a list with one part, the recurrent matrices; empty if there are only convolutions."""
    return [_Part("temporal", list(buffers.temporal))] if buffers.temporal.numel() else []


def _undivided(buffers: StateBuffers, tp_size: int) -> Iterator[_Part]:
    """Yield this rank's whole state: one part for each tensor."""
    whole = _convolutions(buffers)
    whole |= {part.name: buffers.temporal for part in _temporal(buffers)}
    for name, tensor in whole.items():
        yield _Part(f"{name} of a rank in {tp_size}", [layer.flatten(1) for layer in tensor])
