"""Answers of a host cache other than matches: free pages, prefetched spans, decisions, timeouts."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from lockstep.coordinator.ballot import Answered, Capped, Landed
from lockstep.errors import CollectiveTimeout, DivergenceError, StorageError
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.group.member.group_rank import FLUSH_POLL_S
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow, Timeouts
from lockstep.ranks.protocol.orders import Fetch, LookUp
from lockstep.ranks.replica.attaching import StoreState
from lockstep.ranks.replica.tree.node import HOST
from tests.kit.ranks.host_threads import on_every_rank
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn
from tests.kit.ranks.passing_time import PassingTime

PROMPT = list(range(4 * PAGE_TOKENS))


def layout(page_tokens: int) -> PageLayout:
    columns = (Column(name="k", layers=1, heads=4, elements=1),)
    return PageLayout(page_tokens=page_tokens, columns=columns)


@pytest.mark.parametrize(
    ("tokens", "window", "state"),
    [(8, 0, 4), (16, 8, 12), (18, 8, 12), (4, 0, 0)],
)
def test_a_match_needs_of_each_pool_what_its_last_token_looks_back_to(
    tokens: int, window: int, state: int
) -> None:
    ranks = HostRanksInTurn(
        1,
        store=False,
        components=(
            SlidingWindow(window_tokens=8, layout=layout(4), device_pages=0, host_pages=8),
            Recurrent(checkpoint_tokens=4, layout=layout(1), device_pages=0, host_pages=8),
        ),
    )

    assert ranks.caches[0].needed_from(tokens) == {"kv": 0, "window": window, "state": state}


def test_what_is_free_in_host_memory_is_what_nothing_is_kept_in() -> None:
    ranks = HostRanksInTurn(host_pages=8, store=False)
    assert ranks.every(HostCache.free_host_pages) == 8

    ranks.every(lambda cache: cache.back_up("r", PROMPT, range(4)))
    ranks.settle()

    assert ranks.every(HostCache.free_host_pages) == ranks.free(HOST) == 4


def test_what_a_prefetch_has_brought_is_told_from_its_first_token_to_its_last() -> None:
    ranks = HostRanksInTurn()
    ranks.every(lambda cache: cache.back_up("w", PROMPT[:PAGE_TOKENS], range(1)))
    ranks.settle()
    ranks.every(lambda cache: cache.prefetch("r", PROMPT))
    assert ranks.every(lambda cache: cache.fetched("r")) == (0, 0)

    ranks.settle(lambda key: True)

    assert ranks.every(lambda cache: cache.fetched("r")) == (PAGE_TOKENS, len(PROMPT))
    assert ranks.every(lambda cache: cache.fetched("nobody")) == (0, 0)


def test_what_one_rank_could_not_read_was_brought_to_nobody() -> None:
    ranks = HostRanksInTurn()
    ranks.every(lambda cache: cache.prefetch("r", PROMPT))
    for executor in ranks.executors:
        executor.reports.append(Answered(executor.take(LookUp)[0].operation, 4))
    ranks.step()
    for executor, pages in zip(ranks.executors, (4, 3), strict=True):
        operation = executor.take(Fetch)[0].operation
        executor.reports += [Landed(operation, pages), Capped(operation, pages)]

    ranks.settle()

    assert ranks.every(lambda cache: cache.fetched("r")) == (0, 3 * PAGE_TOKENS)


def test_ranks_that_have_done_the_same_find_nothing_and_go_on() -> None:
    def program(host: HostCache) -> tuple[object, int]:
        found = host.compare(20.0)
        host.step(idle_s=0.001)
        return found, host.inspection.rounds

    assert on_every_rank(program) == [(None, 2)] * 2


@pytest.mark.parametrize("depth", [0, 1])
def test_ranks_that_differ_are_named_to_whom_compares(depth: int) -> None:
    def program(host: HostCache) -> object:
        host.digest_facts("batch", host.rank)
        return host.compare(20.0)

    found = on_every_rank(program, pipeline_depth=depth)

    assert [type(each) for each in found] == [DivergenceError] * 2
    assert all("rank 1: engine batch 1" in str(each) for each in found)


def test_a_rank_that_does_not_come_is_not_awaited_for_longer_and_the_group_has_ended() -> None:
    ranks = HostRanksInTurn(timeouts=Timeouts(round_s=1000.0))
    cache = ranks.caches[0]

    found = cache.compare(0.05)

    assert isinstance(found, CollectiveTimeout)
    assert cache.inspection.ended_by is found
    assert cache.compare(0.05) is found


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_that_stands_still_waits_until_all_ranks_have_decided(
    depth: int, tmp_path: Path
) -> None:
    def program(host: HostCache) -> list[object]:
        outcomes: list[object] = []
        attach = partial(host.attach_store, f"file://{tmp_path}")
        for propose in (attach, host.detach_store):
            proposal = propose()
            outcomes += [host.run_until_decided(proposal), proposal.exception(), host.store_state()]
        return outcomes

    attached, detached = (True, None, StoreState.ATTACHED), (True, None, StoreState.DETACHED)

    assert on_every_rank(program, pipeline_depth=depth) == [[*attached, *detached]] * 2


def test_a_decision_that_never_comes_is_awaited_for_twice_as_long_as_a_store_may_take() -> None:
    ranks = HostRanksInTurn(1, store=False, timeouts=Timeouts(open_s=5.0))
    ranks.now_ms = PassingTime(1000)
    never: Future[None] = Future()

    assert not ranks.caches[0].run_until_decided(never)
    assert ranks.caches[0].inspection.rounds == 12


def of_a_backup_that_nobody_begins(cache: HostCache) -> bool:
    cache.back_up("r", PROMPT, range(4))
    assert not cache.release("r")
    return cache.finish_copies()


def of_a_decision_that_never_comes(cache: HostCache) -> bool:
    return cache.run_until_decided(Future())


@pytest.mark.parametrize(
    "finished",
    [of_a_backup_that_nobody_begins, of_a_decision_that_never_comes],
    ids=["backup", "decision"],
)
def test_an_engine_that_stands_still_takes_a_round_in_each_poll_and_no_more(
    finished: Callable[[HostCache], bool],
) -> None:
    times = Timeouts(open_s=0.05, copy_s=0.05, quiesce_s=0.05)
    ranks = HostRanksInTurn(1, store=False, timeouts=times)
    ranks.now_ms, (cache,) = PassingTime(10), ranks.caches
    began_s = time.monotonic()

    assert not finished(cache)
    assert cache.inspection.rounds <= 2 + (time.monotonic() - began_s) / FLUSH_POLL_S


def test_a_decision_that_comes_with_the_last_round_is_one() -> None:
    """A proposal decided in the last round counts, even if that round's clock is past the deadline."""
    ranks = HostRanksInTurn(1, store=False, timeouts=Timeouts(open_s=5.0))
    ranks.now_ms = PassingTime(3_600_000)
    proposal = ranks.caches[0].attach_store("memory://never-ready")

    assert ranks.caches[0].run_until_decided(proposal)
    assert isinstance(proposal.exception(timeout=0), StorageError)
