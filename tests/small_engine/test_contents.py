"""Page contents depend only on prefix, column, layer and global head."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.pools import DevicePool
from lockstep.small_engine.contents import CONTENTS_SEED, KeyedTokens, PageContents, chain_keys

LAYOUT = PageLayout(
    page_tokens=8,
    columns=(
        Column(name="k", layers=2, heads=4, elements=4),
        Column(name="v", layers=2, heads=4, elements=4),
        Column(name="index", layers=2, heads=1, elements=3, dtype="uint8", replicated=True),
    ),
)
KEYS = chain_keys(b"seed", np.arange(6 * 8, dtype=np.int32).tobytes(), 8)


@dataclass(frozen=True)
class Rank:
    pool: DevicePool
    contents: PageContents

    def column(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a copy of a column's bytes, of shape [layers, pages, heads, bytes per head]."""
        tensor = self.pool.column(name).view(torch.uint8)
        return tensor.view(*tensor.shape[:3], -1).numpy().copy()


def filled(layout: PageLayout, rank: int, world_size: int, stages: int = 1) -> Rank:
    shard = layout.shard(rank, world_size, stages=stages)
    pool = DevicePool(shard, len(KEYS), torch.device("cpu"))
    contents = PageContents(shard)
    contents.fill(pool, np.arange(len(KEYS), dtype=np.int32), KEYS)
    return Rank(pool, contents)


def bytes_of(layout: PageLayout, world_size: int) -> dict[str, npt.NDArray[np.uint8]]:
    ranks = [filled(layout, rank, world_size) for rank in range(world_size)]
    return {
        column.name: ranks[0].column(column.name)
        if column.replicated
        else np.concatenate([rank.column(column.name) for rank in ranks], axis=2)
        for column in layout.columns
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_head_holds_the_same_bytes_under_any_number_of_ranks(world_size: int) -> None:
    alone, together = bytes_of(LAYOUT, 1), bytes_of(LAYOUT, world_size)

    assert {name: pages.tolist() for name, pages in together.items()} == {
        name: pages.tolist() for name, pages in alone.items()
    }


@pytest.mark.parametrize("column", [column.name for column in LAYOUT.columns])
def test_a_layer_holds_the_same_bytes_under_any_number_of_stages(column: str) -> None:
    alone, stages = filled(LAYOUT, 0, 1), [filled(LAYOUT, rank, 2, stages=2) for rank in range(2)]

    together = np.concatenate([stage.column(column) for stage in stages])

    assert np.array_equal(alone.column(column), together)


def test_strips_of_all_pages_columns_layers_and_heads_differ() -> None:
    strips = [
        strip.tobytes()
        for name, pages in bytes_of(LAYOUT, 1).items()
        if name != "index"
        for strip in pages.reshape(-1, pages.shape[-1])
    ]

    assert len(set(strips)) == len(strips)


def flips(rank: Rank, column: str) -> Iterator[int]:
    """Flip a bit of every seventh byte in a column's page 3, one at a time; yield each byte's index."""
    view = rank.pool.column(column).view(torch.uint8)
    flat = view[:, 3].flatten()
    for index in range(0, len(flat), 7):
        changed = flat.clone()
        changed[index] ^= 1 << index % 8
        view[:, 3] = changed.view_as(view[:, 3])
        yield index
    view[:, 3] = flat.view_as(view[:, 3])


@pytest.mark.parametrize("column", [column.name for column in LAYOUT.columns])
def test_any_flipped_bit_and_any_swapped_page_is_noticed(column: str) -> None:
    rank = filled(LAYOUT, 1, 2)
    pages = np.arange(len(KEYS), dtype=np.int32)
    assert rank.contents.verify(rank.pool, pages, KEYS) == 0

    found = {index: rank.contents.verify(rank.pool, pages, KEYS) for index in flips(rank, column)}

    assert set(found.values()) == {1}
    assert rank.contents.verify(rank.pool, pages, KEYS) == 0
    swapped = np.array([1, 0, 2, 3, 4, 5], dtype=np.int32)
    assert rank.contents.verify(rank.pool, swapped, KEYS) == 2


def test_only_the_given_pages_are_filled_in_their_order() -> None:
    shard = LAYOUT.shard(0, 2)
    pool = DevicePool(shard, 8, torch.device("cpu"))
    contents = PageContents(shard)
    pages = np.array([6, 2], dtype=np.int32)

    contents.fill(pool, pages, KEYS[:2])

    assert contents.verify(pool, pages, KEYS[:2]) == 0
    assert not pool.column("k")[:, [0, 1, 3, 4, 5, 7]].any()


def test_keys_that_do_not_go_with_the_pages_are_refused() -> None:
    rank = filled(LAYOUT, 0, 1)

    with pytest.raises(ValueError, match="2 pages were given with 1 keys"):
        rank.contents.verify(rank.pool, np.array([0, 1], dtype=np.int32), KEYS[:1])


def test_a_key_depends_on_the_seed_and_on_all_tokens_before_it() -> None:
    tokens = np.arange(32, dtype=np.int32)
    changed = tokens.copy()
    changed[0] += 1

    keys = chain_keys(b"seed", tokens.tobytes(), 8)

    assert len(set(keys)) == 4
    assert not set(keys) & set(chain_keys(b"seed", changed.tobytes(), 8))
    assert not set(keys) & set(chain_keys(b"other", tokens.tobytes(), 8))
    assert chain_keys(b"seed", tokens[:31].tobytes(), 8) == keys[:3]


def test_pools_with_columns_of_the_same_name_hold_different_bytes_for_the_same_page() -> None:
    shard = LAYOUT.shard(0, 1)
    rank = filled(LAYOUT, 0, 1)
    pages = np.arange(len(KEYS), dtype=np.int32)

    window = PageContents(shard, "window")

    assert window.verify(rank.pool, pages, KEYS) == len(KEYS)
    window.fill(rank.pool, pages, KEYS)
    assert window.verify(rank.pool, pages, KEYS) == 0
    assert rank.contents.verify(rank.pool, pages, KEYS) == len(KEYS)


def test_a_state_at_the_end_of_a_page_has_that_pages_key() -> None:
    ids = np.arange(32, dtype=np.int32)

    tokens = KeyedTokens(ids, 8)

    assert tokens.page_keys == chain_keys(CONTENTS_SEED, ids.tobytes(), 8)
    assert [tokens.state_key(end) for end in (8, 16, 24, 32)] == tokens.page_keys
    assert tokens.state_key(0) == CONTENTS_SEED


def test_a_state_inside_of_a_page_depends_on_every_token_before_it_and_on_none_after() -> None:
    ids = np.arange(32, dtype=np.int32)
    first, fifteenth, sixteenth = ids.copy(), ids.copy(), ids.copy()
    first[0] += 1
    fifteenth[14] += 1
    sixteenth[15] += 1

    key = KeyedTokens(ids, 8).state_key(15)

    assert KeyedTokens(first, 8).state_key(15) != key
    assert KeyedTokens(fifteenth, 8).state_key(15) != key
    assert KeyedTokens(sixteenth, 8).state_key(15) == key
    assert len({KeyedTokens(ids, 8).state_key(at) for at in range(33)}) == 33
