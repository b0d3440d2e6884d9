"""vLLM's groups of layers as pools, the blocks that a copy reads or fills, and refused models."""

from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.vllm.groups import STATES_SHARE, GroupKind, PoolGroup, pool_groups
from lockstep.integrations.vllm.lent_blocks import LentBlocks
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from tests.kit.vllm.groups import (
    TOKENS,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    groups,
)

LAYOUT = PageLayout(page_tokens=TOKENS, columns=(Column(name="k", layers=1, heads=1, elements=1),))
STATES = PageLayout(page_tokens=1, columns=LAYOUT.columns)


def named(*specs: Any) -> list[tuple[str, int]]:
    return [(each.name, each.group) for each in pool_groups(groups(*specs))]


def test_full_attention_is_the_main_pool_wherever_the_engine_has_its_group() -> None:
    window, full, state = SlidingWindowSpec(), FullAttentionSpec(), MambaSpec()

    assert named(window, full, window) == [("kv", 1), ("window", 0), ("window.1", 2)]
    assert named(state, state, full) == [("kv", 2), ("state", 0), ("state.1", 1)]
    assert named(MLAAttentionSpec()) == [("kv", 0)]


def test_a_window_needs_the_tokens_before_the_next_one_and_what_drafts_keep_beside() -> None:
    spec = SlidingWindowSpec(sliding_window=128, extra_retained_tokens=2)

    [_, window] = pool_groups(groups(FullAttentionSpec(), spec))

    component = window.component(LAYOUT, pages=10)
    assert isinstance(component, SlidingWindow)
    assert (component.window_tokens, component.host_pages) == (129, 10)


def test_a_second_group_of_full_attention_is_needed_whole() -> None:
    [_, second] = pool_groups(groups(FullAttentionSpec(), FullAttentionSpec()))

    component = second.component(LAYOUT, pages=10)

    assert isinstance(component, SlidingWindow)
    assert component.window_tokens == 1 << 30


def test_a_state_may_be_kept_after_every_page_and_has_a_share_of_the_host_pages() -> None:
    [_, state] = pool_groups(groups(FullAttentionSpec(), MambaSpec()))

    component = state.component(STATES, pages=STATES_SHARE + 1)

    assert isinstance(component, Recurrent)
    assert (component.checkpoint_tokens, component.host_pages) == (TOKENS, 2)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [ChunkedLocalAttentionSpec()],
            "'0.a' keeps its KV as ChunkedLocalAttentionSpec, and Lock",
        ),
        ([FullAttentionSpec(tokens_per_state=4)], "one entry of it has 4 tokens"),
        ([FullAttentionSpec(), MambaSpec(mamba_cache_mode="all")], "mamba_cache_mode is 'all'"),
        ([FullAttentionSpec(), SlidingWindowSpec(sliding_window=1)], "windows of 2 tokens or more"),
        ([MambaSpec()], "no layer of full attention"),
        (
            [FullAttentionSpec(), SlidingWindowSpec(block_size=16)],
            r"blocks of different sizes \(32 for kv, 16 for window tokens\)",
        ),
    ],
)
def test_what_no_pool_can_hold_is_refused_by_name(specs: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_groups(groups(*specs))


POOLS = [
    PoolGroup("kv", 1, GroupKind.FULL, TOKENS, 0),
    PoolGroup("window", 0, GroupKind.WINDOW, TOKENS, 64),
    PoolGroup("state", 2, GroupKind.STATE, TOKENS, TOKENS),
]
BLOCKS = ([0, 0, 13, 14], [21, 22, 23, 24], [0, 0, 0, 34])


def listed(lent: dict[str, Any]) -> dict[str, list[int]]:
    return {name: run.tolist() for name, run in lent.items()}


def test_a_load_is_brought_to_the_blocks_that_the_engine_has_for_it() -> None:
    """A load fills the engine's blocks except null block 0; a state is loaded into the last block."""
    lent = LentBlocks(POOLS).for_load(BLOCKS, 1, 4)

    assert listed(lent) == {"kv": [22, 23, 24], "window": [-1, 13, 14], "state": [34]}


def test_a_backup_lends_a_state_only_where_it_is_the_one_after_the_last_page() -> None:
    lending = LentBlocks(POOLS)

    with_state = lending.for_backup(BLOCKS, 4, state=True)
    without = lending.for_backup(BLOCKS, 3, state=False)

    assert listed(with_state) == {
        "kv": [21, 22, 23, 24],
        "window": [-1, -1, 13, 14],
        "state": [34],
    }
    assert listed(without) == {"kv": [21, 22, 23], "window": [-1, -1, 13], "state": []}
    assert lending.passing(with_state) == [13, 14, 34]
