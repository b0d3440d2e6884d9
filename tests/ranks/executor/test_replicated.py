"""Replicated pages: each page is written by exactly one rank."""

from collections.abc import Callable

import pytest

from lockstep.coordinator.ballot import TransferEnded
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.writers import WriterShare
from lockstep.ranks.protocol.orders import KV_POOL, ObjectTransfer, Put
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.wrappers.base import Call
from tests.kit.ranks.executor_parts import (
    LONG_S,
    HeldStore,
    happened,
    hashed_keys,
    hashed_objects,
    key_outcomes,
    keys,
    latent_layout,
    make_executor,
    mixed_layout,
)

RANKS = 4
PAGES = 256


@pytest.fixture
def group(made: Callable[..., RankExecutor]) -> list[RankExecutor]:
    """Return the executors of a group whose ranks share a store; they are closed at teardown."""
    shelf = Shelf()
    return [
        made(
            latent_layout(rank),
            backend=MemoryBackend(shelf),
            writer=WriterShare(rank=rank, world_size=RANKS),
            host_pages=PAGES,
        )
        for rank in range(RANKS)
    ]


def test_a_replicated_page_is_written_by_exactly_one_rank_and_the_ranks_share_the_work(
    group: list[RankExecutor],
) -> None:
    order = Put(1, hashed_objects(PAGES), LONG_S)

    ended = [happened(executor, [order], bool) for executor in group]

    assert ended == [[TransferEnded(1, ok=True)]] * RANKS
    outcomes = [key_outcomes(executor, Call.WRITE) for executor in group]
    written = [each["ok"] for each in outcomes]
    assert sum(written) == PAGES
    assert not any(each["present"] for each in outcomes)
    assert min(written) > PAGES / RANKS * 0.7
    assert max(written) < PAGES / RANKS * 1.3


def test_a_writer_that_fails_says_so_and_the_others_are_done(group: list[RankExecutor]) -> None:
    key = hashed_keys(1)
    wrong = Put(1, (ObjectTransfer(KV_POOL, key, (PAGES,)),), LONG_S)

    ended = [happened(executor, [wrong], bool) for executor in group]

    assert sorted(each == [TransferEnded(1, ok=True)] for each in ended) == [
        False,
        True,
        True,
        True,
    ]
    assert ended.count([TransferEnded(1, ok=False)]) == 1


def test_of_several_pools_only_the_replicated_ones_are_shared_out() -> None:
    store = HeldStore()
    executor = make_executor(
        mixed_layout(),
        components={"latent": latent_layout()},
        backend=store,
        writer=WriterShare(rank=1, world_size=RANKS),
        host_pages=8,
    )
    # A key's first bytes select its writer; short keys start with zeros, so rank 0 writes them all.
    transfers = tuple(
        ObjectTransfer(pool, keys(4, first), tuple(range(4)))
        for pool, first in ((KV_POOL, 0), ("latent", 100))
    )

    progress = happened(executor, [Put(1, transfers, LONG_S)], bool)

    executor.close()
    assert progress == [TransferEnded(1, ok=True)]
    assert key_outcomes(executor, Call.WRITE)["ok"] == 4
    assert [int(key, 16) for key in store.next_entered()] == [0, 1, 2, 3]
