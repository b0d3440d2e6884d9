"""Pages that are the same on every rank: written once, by one rank each, and read by all."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Answered, Ended, Landed, Progress, Quiesced
from lockstep.page_format.page_layout import ShardLayout
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.writers import EVERYTHING, WriterShare
from lockstep.ranks.protocol.orders import KV_POOL, Cancel, Fetch, LookUp, Need, ObjectTransfer, Put
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.wrappers.base import Call
from tests.kit.ranks.executor_parts import (
    LONG_S,
    HeldStore,
    fill_host,
    grouped_layout,
    happened,
    hashed_keys,
    hashed_objects,
    includes,
    key_outcomes,
    keys,
    latent_layout,
    make_executor,
    mixed_layout,
)

RANKS = 4
PAGES = 256

Group = Callable[..., list[RankExecutor]]


@pytest.fixture
def group(made: Callable[..., RankExecutor]) -> Group:
    """Make the executors of a group of ranks that share a store; they are closed at the end."""

    def make(layout: Callable[[int], ShardLayout], *, spread: bool = True) -> list[RankExecutor]:
        shelf = Shelf()
        return [
            made(
                layout(rank),
                backend=MemoryBackend(shelf),
                writer=WriterShare(rank=rank, world_size=RANKS) if spread else EVERYTHING,
                host_pages=PAGES,
            )
            for rank in range(RANKS)
        ]

    return make


def persisted(executors: list[RankExecutor], count: int = PAGES) -> list[list[Progress]]:
    """Let every rank persist the same pages; return what each of them reports."""
    order = Put(1, hashed_objects(count), LONG_S)
    return [happened(executor, [order], bool) for executor in executors]


def pages(executor: RankExecutor) -> list[bytes]:
    return [bytes(executor.host_pool.page(page)) for page in range(PAGES)]


def writes(executors: list[RankExecutor]) -> list[int]:
    return [key_outcomes(executor, Call.WRITE)["ok"] for executor in executors]


def test_a_replicated_page_is_written_by_exactly_one_rank_and_the_ranks_share_the_work(
    group: Group,
) -> None:
    executors = group(latent_layout)

    ended = persisted(executors)

    assert ended == [[Ended(1, ok=True)]] * RANKS
    assert sum(writes(executors)) == PAGES
    assert not any(key_outcomes(executor, Call.WRITE)["present"] for executor in executors)
    assert min(writes(executors)) > PAGES / RANKS * 0.7
    assert max(writes(executors)) < PAGES / RANKS * 1.3


def test_the_bytes_of_a_replicated_page_are_counted_where_they_were_written(group: Group) -> None:
    executors = group(latent_layout)
    page_bytes = executors[0].host_pool.layout.page_bytes

    persisted(executors)
    quiet = [happened(each, [Cancel(1, LONG_S)], includes(Quiesced(1))) for each in executors]

    moved = [executor.counts().bytes_moved.l2_to_l3 for executor in executors]
    assert quiet == [[Quiesced(1)]] * RANKS
    assert moved == [count * page_bytes for count in writes(executors)]


def test_every_rank_reads_the_replicated_pages_that_others_have_written(group: Group) -> None:
    executors = group(latent_layout)
    [content, *_] = [fill_host(executor.host_pool, 3) for executor in executors]
    persisted(executors)
    blank = [executor.host_pool.bytes_tensor.zero_() for executor in executors]

    landed = [
        happened(executor, [Fetch(2, hashed_objects(PAGES), LONG_S)], includes(Landed(2, PAGES)))
        for executor in executors
    ]

    assert len(landed) == len(blank) == RANKS
    assert [pages(executor) for executor in executors] == [content] * RANKS


def test_until_its_writer_has_written_a_page_nobody_finds_it(group: Group) -> None:
    """The other ranks say that they are done, and the verdict waits for the writer."""
    executors = group(latent_layout)
    lookup = LookUp(2, 0, (Need(KV_POOL, 0, hashed_keys(PAGES)),), LONG_S)
    shares = [WriterShare(rank=rank, world_size=RANKS) for rank in range(RANKS)]
    writer = next(rank for rank in range(RANKS) if shares[rank].has(hashed_keys(1)[0]))
    others = [executor for rank, executor in enumerate(executors) if rank != writer]
    persisted(others)

    before = happened(others[0], [lookup], bool)
    persisted([executors[writer]])
    after = happened(others[0], [lookup], bool)

    assert before == [Answered(2, 0)]
    assert after == [Answered(2, PAGES)]


def test_a_writer_that_fails_says_so_and_the_others_are_done(group: Group) -> None:
    executors = group(latent_layout)
    key = hashed_keys(1)
    wrong = Put(1, (ObjectTransfer(KV_POOL, key, (PAGES,)),), LONG_S)

    ended = [happened(executor, [wrong], bool) for executor in executors]

    assert sorted(each == [Ended(1, ok=True)] for each in ended) == [False, True, True, True]
    assert ended.count([Ended(1, ok=False)]) == 1


def test_a_page_with_a_column_that_is_divided_is_written_by_every_rank(group: Group) -> None:
    executors = group(partial(grouped_layout, RANKS))

    persisted(executors, 8)

    assert writes(executors) == [8] * RANKS


def test_a_rank_with_a_store_of_its_own_writes_every_page(group: Group) -> None:
    executors = group(latent_layout, spread=False)

    persisted(executors, 8)

    written = [key_outcomes(executor, Call.WRITE) for executor in executors]
    assert [each["ok"] + each["present"] for each in written] == [8] * RANKS


def test_of_several_pools_only_the_replicated_ones_are_shared_out() -> None:
    store = HeldStore()
    executor = make_executor(
        mixed_layout(),
        components={"latent": latent_layout()},
        backend=store,
        writer=WriterShare(rank=1, world_size=RANKS),
        host_pages=8,
    )
    # Short keys begin with zeros, so that rank 0 is the writer of them all.
    transfers = tuple(
        ObjectTransfer(pool, keys(4, first), tuple(range(4)))
        for pool, first in ((KV_POOL, 0), ("latent", 100))
    )

    progress = happened(executor, [Put(1, transfers, LONG_S)], bool)

    executor.close()
    assert progress == [Ended(1, ok=True)]
    assert key_outcomes(executor, Call.WRITE)["ok"] == 4
    assert [int(key, 16) for key in store.next_entered()] == [0, 1, 2, 3]


@given(st.binary(min_size=8, max_size=32), st.integers(min_value=1, max_value=64))
def test_every_key_has_exactly_one_writer(key: bytes, world_size: int) -> None:
    shares = [WriterShare(rank=rank, world_size=world_size) for rank in range(world_size)]

    assert [share.has(key) for share in shares].count(True) == 1
    assert EVERYTHING.has(key)
