"""vLLM's recurrent states as page columns, from which groups of any TP size can read their heads."""

from collections.abc import Mapping

import pytest
import torch

from lockstep.integrations.vllm.state_parts import state_columns
from tests.kit.vllm.groups import MambaSpec, Mixer

KEYS, VALUES, ROWS = 8, 12, 3
HEADS, HEAD_VALUES, HEAD_KEYS = 4, 3, 2
BYTES = torch.Generator().manual_seed(1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=BYTES)


INPUTS = [drawn(2, size, ROWS) for size in (KEYS, KEYS, VALUES)]
"""Convolution inputs of the whole model for two blocks, in the order queries, keys, values."""
RECURRENCE = drawn(2, HEADS, HEAD_VALUES, HEAD_KEYS)


def of_rank(rank: int, ranks: int, *, by_input: bool) -> dict[str, torch.Tensor]:
    """Return, by page column, the units (heads or groups of channels) that one rank stores.

    `by_input` chooses how the rank stores convolution inputs: input by input, or else channel by
    channel.
    """
    inputs = torch.cat([each.chunk(ranks, 1)[rank] for each in INPUTS], 1)
    inputs = (inputs.transpose(1, 2) if by_input else inputs).contiguous()
    recurrence = RECURRENCE.chunk(ranks, 1)[rank].contiguous()
    spec = MambaSpec(
        mamba_type=Mixer.GDN_ATTN, shapes=(tuple(inputs.shape[1:]), tuple(recurrence.shape[1:]))
    )
    content = torch.cat([inputs.flatten(1), recurrence.flatten(1)], 1).view(torch.int8)
    # Like vLLM's, these blocks have padding after their content.
    block = torch.zeros(2, content.shape[1] + 64, dtype=torch.int8)
    block[:, : content.shape[1]] = content
    view = block[:, : content.shape[1]].view(2, 1, 1, -1)
    found = state_columns(spec, [view], ranks)
    return {column.name: torch.stack(list(views)) for column, views in found}


def joined(ranks: int, *, by_input: bool) -> Mapping[str, torch.Tensor]:
    """Return, by page column, the units of all ranks, joined in the order of the ranks."""
    parts = [of_rank(rank, ranks, by_input=by_input) for rank in range(ranks)]
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_another_number_have_the_same_page(ranks: int, by_input: bool) -> None:
    alone, together = joined(1, by_input=by_input), joined(ranks, by_input=by_input)

    assert set(alone) == set(together)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_the_two_orders_of_inputs_are_two_layouts() -> None:
    assert sorted(joined(1, by_input=False)) == ["conv.0", "conv.1", "conv.2", "temporal"]
    assert "conv.0 by input" in joined(1, by_input=True)


def test_more_ranks_than_units_keep_what_each_has() -> None:
    spec = MambaSpec(mamba_type=Mixer.SHORT_CONV, shapes=((5, 2),))

    [(column, _)] = state_columns(spec, [torch.zeros(2, 1, 1, 40, dtype=torch.int8)], 32)

    assert (column.name, column.heads) == ("state of a rank in 32", 32)
