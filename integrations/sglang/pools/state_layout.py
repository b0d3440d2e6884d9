"""SGLang's pool of recurrent states as pages of Lockstep: one slot is one page of states.

A slot holds, of each layer with a state, the last inputs of a convolution (one row for each channel)
and what the recurrence has come to (one matrix for each head). Channels and heads are divided among
ranks. The channels of a convolution are queries, keys and values one after the other, each divided by
itself, so a rank's rows are no run of the whole; each of the parts is a column of its own here. A
column's channels are cut into as many units as all columns have in common, and ranks of any TP size
find theirs.

Where SGLang does not say how its parts are divided, or the ranks cannot divide the units, a page is
what one rank has of it. It names their number, so that no other TP size takes it for its own.
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
"""In how many units a state is cut at the most; more make copies of small states slow."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What is divided among ranks by itself: this rank's channels of it, on every layer."""

    name: str
    layers: Sequence[torch.Tensor]
    """Each [slots, channels, elements ...]."""

    @property
    def channels(self) -> int:
        """How many channels this rank has."""
        return self.layers[0].shape[1]

    def column(self, heads: int, tp_size: int) -> tuple[Column, list[torch.Tensor]]:
        """Return the column of `heads` units, and its tensors as [slots, units, 1, elements]."""
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
                f" {tensor.stride()}, and Lockstep serves ranges of channels that are contiguous; run"
                " without --radix-cache-backend"
            ) from error


def state_columns(pool: Any, tp_size: int) -> dict[Column, list[torch.Tensor]]:
    """Return the columns of a page of states, and the tensors that hold them on this rank.

    Raises `ConfigError` for a pool of states that Lockstep does not serve.
    """
    [info] = pool.get_device_pool_infos()
    buffers: StateBuffers = info.buffer_info
    kind = type(pool).__name__
    if kind != "MambaPool" or buffers.extra_checkpoint_buffers:
        beside = " with other states beside it" if buffers.extra_checkpoint_buffers else ""
        raise ConfigError(
            f"the model's states are in a {kind}{beside}, and Lockstep serves MambaPool alone; run"
            " without --radix-cache-backend"
        )
    parts = _divided(buffers, pool.conv_shard_groups, pool.conv_slice_axis, tp_size)
    heads = _units(parts, tp_size) if parts else 0
    if not parts or heads % tp_size:
        heads, parts = tp_size, list(_undivided(buffers, tp_size))
    return dict(part.column(heads, tp_size) for part in parts)


def _units(parts: Sequence[_Part], tp_size: int) -> int:
    """Return how many units all parts of the whole model are cut in; the same at every TP size."""
    common = gcd(*(part.channels * tp_size for part in parts))
    return max(units for units in range(1, UNITS_MAX + 1) if not common % units)


def _divided(
    buffers: StateBuffers, groups: Sequence[int] | None, axis: int, tp_size: int
) -> list[_Part]:
    """Return the parts, each of which ranks divide evenly; none where they are not known.

    `groups` are the channels of a convolution's parts, of the whole model. `axis` is where a slot has
    its channels: first, or after the inputs.
    """
    temporal, convolutions = _temporal(buffers), _convolutions(buffers)
    if not convolutions:
        return temporal
    if groups is None and len(convolutions) == 1 and not temporal:
        # A short convolution alone: its channels are the model's own, and one part.
        groups = [convolutions["conv0"].shape[2 + axis] * tp_size]
    if groups is None or any(count % tp_size for count in groups):
        return []
    parts = list[_Part]()
    for name, conv in convolutions.items():
        counts = [count // tp_size for count in groups]
        if conv.ndim != 4 or conv.shape[2 + axis] != sum(counts):
            # There are more ranks than heads, and some of these are on several ranks.
            return []
        begin = 0
        for number, count in enumerate(counts):
            layers = list(_channels(conv, axis, begin, begin + count))
            parts.append(_Part(f"{name}.{number}", layers))
            begin += count
    return [*parts, *temporal]


def _channels(conv: torch.Tensor, axis: int, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Yield a range of channels of each layer, with the channels before what they have."""
    for layer in conv:
        if axis == 0:
            yield layer[:, begin:end]
        else:
            # The channels of each input follow each other: an input is as a layer of its own.
            yield from (layer[:, at, begin:end] for at in range(layer.shape[1]))


def _convolutions(buffers: StateBuffers) -> dict[str, torch.Tensor]:
    """Return the inputs of convolutions; a model need not have any."""
    return {f"conv{at}": conv for at, conv in enumerate(buffers.conv) if conv.numel()}


def _temporal(buffers: StateBuffers) -> list[_Part]:
    """Return what the recurrence has come to; a short convolution has nothing but its inputs."""
    return [_Part("temporal", list(buffers.temporal))] if buffers.temporal.numel() else []


def _undivided(buffers: StateBuffers, tp_size: int) -> Iterator[_Part]:
    """Yield the parts as one rank has them."""
    whole = _convolutions(buffers)
    whole |= {part.name: buffers.temporal for part in _temporal(buffers)}
    for name, tensor in whole.items():
        yield _Part(f"{name} of a rank in {tp_size}", [layer.flatten(1) for layer in tensor])
