"""SGLang's recurrent states as columns, and the TP sizes of the groups that can read them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.pools.state_layout import state_columns

LAYERS, SLOTS, INPUTS = 2, 5, 3


@dataclass
class MambaPool:
    """Stand-in for SGLang's pool of states: the inputs of a convolution and the recurrence's state."""

    conv: Sequence[torch.Tensor]
    temporal: torch.Tensor
    conv_shard_groups: Sequence[int] | None = None
    conv_slice_axis: int = 0
    beside: Sequence[object] = field(default_factory=list[object])

    def get_device_pool_infos(self) -> list[Any]:
        info = SimpleNamespace(
            conv=self.conv, temporal=self.temporal, extra_checkpoint_buffers=self.beside
        )
        return [SimpleNamespace(buffer_info=info)]


class UnifiedMambaPool(MambaPool):
    """A class that Lockstep does not support, although it is derived from a supported pool class."""


def pool(channels: int, heads: int = 0, **other: Any) -> MambaPool:
    conv = torch.zeros(LAYERS, SLOTS, channels, INPUTS, dtype=torch.bfloat16)
    return MambaPool([conv], torch.zeros(LAYERS, SLOTS, heads, 4, 2 if heads else 0), **other)


def described(pool: MambaPool, tp_size: int) -> dict[str, tuple[int, int, int]]:
    columns = state_columns(pool, tp_size)
    for column, tensors in columns.items():
        shape = (SLOTS, column.heads // tp_size, 1, column.elements)
        assert [tensor.shape for tensor in tensors] == [shape] * column.layers
    return {each.name: (each.layers, each.heads, each.elements) for each in columns}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_parts_of_a_convolution_and_the_heads_have_the_same_units_at_every_tp_size(
    tp: int,
) -> None:
    of_a_rank = pool((16 + 16 + 32) // tp, 8 // tp, conv_shard_groups=[16, 16, 32])

    assert described(of_a_rank, tp) == {
        "conv0.0": (LAYERS, 8, 2 * INPUTS),
        "conv0.1": (LAYERS, 8, 2 * INPUTS),
        "conv0.2": (LAYERS, 8, 4 * INPUTS),
        "temporal": (LAYERS, 8, 8),
    }


def test_where_inputs_come_first_each_is_as_a_layer() -> None:
    conv = torch.zeros(LAYERS, SLOTS, INPUTS, 12)
    of_a_rank = MambaPool([conv], torch.zeros(0), conv_shard_groups=[8, 16], conv_slice_axis=1)

    assert described(of_a_rank, 2) == {
        "conv0.0": (LAYERS * INPUTS, 8, 1),
        "conv0.1": (LAYERS * INPUTS, 8, 2),
    }


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_short_convolution_alone_is_one_part_of_the_model_s_own_channels(tp: int) -> None:
    assert described(pool(64 // tp), tp) == {"conv0.0": (LAYERS, 16, 4 * INPUTS)}


@pytest.mark.parametrize("tp", [1, 2])
def test_heads_alone_are_divided_as_they_are(tp: int) -> None:
    assert described(pool(0, 8 // tp), tp) == {"temporal": (LAYERS, 8, 8)}


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_not_said_to_be_divided_belongs_to_one_tp_size(tp: int) -> None:
    assert described(pool(24 // tp, 8 // tp), tp) == {
        f"conv0 of a rank in {tp}": (LAYERS, tp, 24 // tp * INPUTS),
        f"temporal of a rank in {tp}": (LAYERS, tp, 8 // tp * 8),
    }


def test_with_more_ranks_than_heads_a_state_belongs_to_one_tp_size() -> None:
    """With more ranks than heads, only groups of one TP size share states: SGLang duplicates heads."""
    of_a_rank = pool(10, 2, conv_shard_groups=[8, 8, 16])

    assert set(described(of_a_rank, 4)) == {"conv0 of a rank in 4", "temporal of a rank in 4"}


def test_a_tensor_is_seen_and_not_copied() -> None:
    of_a_rank = pool(64)

    [tensors] = state_columns(of_a_rank, 1).values()
    of_a_rank.conv[0][1, 2, 60:] = 7

    assert (tensors[1][2, -1] == 7).all()
    assert (tensors[1][2, :-1] == 0).all()


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (UnifiedMambaPool(*vars(pool(8)).values()), "in a UnifiedMambaPool; Lockstep supports"),
        (pool(8, beside=[object()]), "in a MambaPool with other states;"),
        (
            MambaPool([torch.zeros(LAYERS, SLOTS, INPUTS, 64).transpose(2, 3)], torch.zeros(0)),
            "'conv0.0' are [5, 64, 3] with strides (192, 1, 64)",
        ),
    ],
)
def test_a_pool_that_is_not_served_is_refused_by_name(refused: MambaPool, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        state_columns(refused, 1)

    assert message in str(error.value)
    assert "--radix-cache-backend" in str(error.value)
