"""Page contents: a function of prefix, column, layer and global head, and of nothing else."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lockstep.launch.contents import PageContents, chain_keys
from lockstep.launch.profiles import PROFILES, find_profile
from lockstep.ranks.executor.pools import DevicePool
from lockstep.ranks.page_layout import Column, PageLayout

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
        """The bytes of a column [layers, pages, heads, unit]."""
        tensor = self.pool.column(name).view(torch.uint8)
        return tensor.view(*tensor.shape[:3], -1).numpy().copy()


def filled(layout: PageLayout, rank: int, world_size: int) -> Rank:
    shard = layout.shard(rank, world_size)
    pool = DevicePool(shard, len(KEYS), torch.device("cpu"))
    contents = PageContents(shard)
    contents.fill(pool, np.arange(len(KEYS), dtype=np.int32), KEYS)
    return Rank(pool, contents)


def bytes_of(layout: PageLayout, world_size: int) -> dict[str, npt.NDArray[np.uint8]]:
    """The whole pages, put together from the shards of all ranks."""
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

    for name, expected in alone.items():
        assert np.array_equal(expected, together[name]), name


def test_a_replicated_column_is_the_same_on_every_rank() -> None:
    first, second = filled(LAYOUT, 0, 2), filled(LAYOUT, 1, 2)

    assert np.array_equal(first.column("index"), second.column("index"))
    assert not np.array_equal(first.column("k"), second.column("k"))


def test_units_of_all_pages_columns_layers_and_heads_differ() -> None:
    units = [
        unit.tobytes()
        for name, pages in bytes_of(LAYOUT, 1).items()
        if name != "index"
        for unit in pages.reshape(-1, pages.shape[-1])
    ]

    assert len(set(units)) == len(units)


def test_any_flipped_bit_and_any_swapped_page_is_noticed() -> None:
    rank = filled(LAYOUT, 1, 2)
    pages = np.arange(len(KEYS), dtype=np.int32)
    assert rank.contents.verify(rank.pool, pages, KEYS) == 0

    for column in LAYOUT.columns:
        view = rank.pool.column(column.name).view(torch.uint8)
        flat = view[:, 3].flatten()
        for index in range(0, len(flat), 7):
            changed = flat.clone()
            changed[index] ^= 1 << index % 8
            view[:, 3] = changed.view_as(view[:, 3])
            assert rank.contents.verify(rank.pool, pages, KEYS) == 1
        view[:, 3] = flat.view_as(view[:, 3])

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


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_small_enough_to_replay_and_says_its_scale(name: str) -> None:
    profile = find_profile(name)

    assert profile.layout(64).shard(0, 1).page_bytes <= 16 << 10
    assert profile.model in profile.scale
