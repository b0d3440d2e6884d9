"""vLLM's recurrent states as page columns that can be divided among any number of ranks.

In a layer with a recurrent state, a block is one row of bytes: the last inputs of a convolution, then
the recurrent state. The convolution's channels may be several parts in sequence, such as queries, keys
and values. Ranks divide each part separately, so each part is a column. vLLM stores the inputs either
channel by channel or input by input, so there are two page layouts.

If the parts are unknown or not divisible, a page is the whole state of one rank. The number of ranks is
then part of the column's name, so that groups of another TP size find no such page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch

from ...page_format.page_layout import Column
from .contract import StateSpec

STATE, INPUTS, RECURRENCE = "state", "conv", "temporal"
UNITS_MAX = 16
"""Maximum number of units (heads of a column) into which a state is divided; more units would slow
down copies."""

StateColumns = list[tuple[Column, Sequence[torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a recurrent state that ranks divide by channels.

    In a block of vLLM's cache, the part is several runs of channels: one run of `channels` channels at
    each byte offset in `begins`.
    """

    name: str
    begins: tuple[int, ...]
    channels: int
    """Number of channels that this part of the state has on this rank."""
    channel_bytes: int


def state_columns(spec: StateSpec, tensors: Sequence[torch.Tensor], ranks: int) -> StateColumns:
    """Return the columns of a state's page; `tensors` are [blocks, 1, 1, bytes], one per layer."""
    nbytes = tensors[0].shape[3]
    if spec.tp_replicated:
        return [_column(_Part(STATE, (0,), 1, nbytes), tensors, 1, None)]
    parts = _parts(spec)
    units = _units(parts, ranks)
    if not parts or units % ranks:
        return [_column(_Part(f"{STATE} of a rank in {ranks}", (0,), 1, nbytes), tensors, 1, ranks)]
    return [_column(part, tensors, units // ranks, ranks) for part in parts]


def _parts(spec: StateSpec) -> list[_Part]:
    """Return the parts of a state that ranks divide; an empty list if they are unknown."""
    inputs, *recurrent = spec.shapes
    width = spec.dtypes[0].itemsize
    of_recurrence: list[_Part] = []
    if recurrent:
        heads, *rest = recurrent[0]
        begin = prod(inputs) * width
        nbytes = prod(rest) * spec.dtypes[1].itemsize
        of_recurrence.append(_Part(RECURRENCE, (begin,), heads, nbytes))
    # Take the larger dimension as the channels, because a convolution keeps only a few inputs.
    channels, rows = max(inputs), min(inputs)
    match spec.mamba_type.name:
        case "GDN_ATTN" if len(recurrent) == 1:
            values = prod(recurrent[0][:2])
            keys, odd = divmod(channels - values, 2)
            if odd or keys < 1:
                return []
            sizes = [keys, keys, values]
        case "MAMBA1" | "SHORT_CONV":
            sizes = [channels]
        case _:
            return []
    found: list[_Part] = []
    first = 0
    for at, size in enumerate(sizes):
        if inputs[0] == channels:
            part = _Part(f"{INPUTS}.{at}", (first * rows * width,), size, rows * width)
        else:
            begins = tuple((row * channels + first) * width for row in range(rows))
            part = _Part(f"{INPUTS}.{at} by input", begins, size, width)
        found.append(part)
        first += size
    return found + of_recurrence


def _units(parts: Sequence[_Part], ranks: int) -> int:
    """Return the number of units of the whole model's state; it is the same at any TP size."""
    common = gcd(*(part.channels * ranks for part in parts))
    return max((each for each in range(1, UNITS_MAX + 1) if not common % each), default=1)


def _column(
    part: _Part, tensors: Sequence[torch.Tensor], units: int, ranks: int | None
) -> tuple[Column, Sequence[torch.Tensor]]:
    """Return (column, tensors) of a part.

    The tensors are views [blocks, units of this rank, 1, bytes]: one for each layer and each offset at
    which a block has channels of the part.
    """
    length = part.channels * part.channel_bytes
    views = [
        tensor[:, 0, 0, begin : begin + length].view(len(tensor), units, 1, length // units)
        for tensor in tensors
        for begin in part.begins
    ]
    column = Column(
        name=part.name,
        layers=len(views),
        heads=units * (ranks or 1),
        elements=length // units,
        dtype="int8",
        replicated=ranks is None,
    )
    return column, views
