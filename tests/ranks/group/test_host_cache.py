"""Engine-owned (lent) device pages: copies keep them in use, and the replica never reads them."""

import logging
import time
from contextlib import closing
from functools import partial

import pytest
import torch

from lockstep.coordinator.ballot import Answered, Quiesced, QuiesceExpired, TransferEnded
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import ConfigError, GroupError, UsageError
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import CacheConfig, HostCacheConfig
from lockstep.ranks.protocol.orders import (
    CopyToHost,
    Direction,
    Fence,
    LookUp,
    Put,
)
from lockstep.ranks.replica.tree.node import HOST, NO_PERSIST_PREFIX
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn

PROMPT = list(range(4 * PAGE_TOKENS))


def published(ranks: HostRanksInTurn) -> None:
    for rank, cache in enumerate(ranks.caches):
        assert cache.back_up("first", PROMPT, range(10 * rank, 10 * rank + 4)) == len(PROMPT)
        cache.begin_backups()
    ranks.settle()
    assert ranks.every(lambda cache: cache.release("first"))


def begin_backup(ranks: HostRanksInTurn) -> int:
    """Begin a backup of a request's lent pages, and leave it in flight; return its operation."""
    for cache in ranks.caches:
        cache.back_up("r", PROMPT, range(4))
        cache.begin_backups()
    return ranks.take_operation(CopyToHost)


def test_device_pages_may_differ_between_ranks_and_are_outside_the_digest() -> None:
    """Rule R3: an engine's device page numbers are not in the digest: they may differ by rank."""
    ranks = HostRanksInTurn()

    for rank, cache in enumerate(ranks.caches):
        cache.back_up("r", PROMPT, [7 + rank, 1 - rank, 5, 3])
        cache.begin_backups()
    ranks.step()

    sources = [executor.take(CopyToHost)[0].transfers[0].sources for executor in ranks.executors]
    assert sources == [(7, 1, 5, 3), (8, 0, 5, 3)]


def test_copies_begin_where_the_engine_says_that_its_forward_pass_stands() -> None:
    ranks = HostRanksInTurn()
    published(ranks)
    cache, executor = ranks.caches[0], ranks.executors[0]
    other = list(range(1000, 1000 + PAGE_TOKENS))

    assert ranks.every(lambda each: each.match_host("r", PROMPT))
    ranks.every(lambda each: each.load("r", PROMPT, range(4)))
    ranks.every(lambda each: each.back_up("s", other, [9]))
    executor.begun.clear()

    cache.begin_loads()
    assert executor.begun == [Direction.TO_DEVICE]
    cache.begin_backups()
    assert executor.begun == [Direction.TO_DEVICE, Direction.TO_HOST]


def own_pages(*, named: bool = False) -> HostCache:
    """Return one rank's cache over four engine pages, with real copies.

    With `named`, the pages are passed in a mapping by pool name.
    """
    layout = PageLayout(
        page_tokens=PAGE_TOKENS, columns=(Column(name="k", layers=1, heads=1, elements=1),)
    )
    config = HostCacheConfig(model="m", layout=layout, host_pages=4, pipeline_depth=0)
    pages = EnginePages(
        layout.shard(0, 1), {"k": [torch.ones(4, 1, PAGE_TOKENS, 1, dtype=torch.bfloat16)]}
    )
    return HostCache.open(config, {"kv": pages} if named else pages, InProcessGroup(1).member(0))


@pytest.mark.parametrize("named", [False, True])
def test_an_engine_s_pages_of_full_attention_may_be_given_alone_or_by_name(*, named: bool) -> None:
    with closing(own_pages(named=named)) as cache:
        cache.back_up("r", PROMPT, range(4))

        assert cache.flush()
        assert cache.match_host("another", PROMPT) == len(PROMPT)


def test_a_backup_that_was_not_begun_when_its_pages_are_taken_away_never_begins() -> None:
    with closing(own_pages()) as cache:
        cache.back_up("r", PROMPT, range(4))
        cache.fence("r")
        cache.begin_backups()

        assert cache.flush()
        assert cache.match_host("another", PROMPT) == 0
        assert cache.stats().bytes_moved.l1_to_l2 == 0


def test_an_idle_step_does_not_wait_for_a_backup_that_the_engine_has_not_begun() -> None:
    with closing(own_pages()) as cache:
        cache.begin_step()
        cache.back_up("r", PROMPT, range(4))

        started = time.monotonic()
        cache.end_step(idle_s=60.0)

        assert time.monotonic() - started < 30.0
        assert cache.flush()
        assert cache.match_host("another", PROMPT) == len(PROMPT)


def test_pages_of_a_released_request_are_lent_until_its_copies_have_ended() -> None:
    ranks = HostRanksInTurn(store=False)
    begin_backup(ranks)
    assert not ranks.every(lambda cache: cache.release("r"))

    assert ranks.every(lambda cache: cache.has_copies_in_flight("r"))
    assert not ranks.every(lambda cache: cache.release("r"))
    ranks.caches[0].wait_for_copies("r")
    ranks.caches[1].fence("r")

    fences = [executor.take(Fence) for executor in ranks.executors]
    assert [len(each) for each in fences] == [1, 1]


def looked_up(ranks: HostRanksInTurn, name: str) -> set[bytes]:
    ranks.every(lambda cache: cache.prefetch(name, [*PROMPT, *PROMPT]))
    orders = [order for executor in ranks.executors for order in executor.take(LookUp)]
    return {key for order in orders for key in order.needs[0].keys}


def persisted(ranks: HostRanksInTurn, name: str, first: int = 0) -> set[bytes]:
    ranks.every(lambda cache: cache.back_up(name, PROMPT[first:], range(4)))
    ranks.every(lambda cache: cache.begin_backups())
    ranks.complete()
    orders = [order for executor in ranks.executors for order in executor.given(Put)]
    ranks.settle()
    return {key for order in orders for each in order.transfers for key in each.keys}


def test_a_reset_that_names_no_version_leaves_storage_alone() -> None:
    """After a reset without a version, storage is unused: its new page keys are lost at a restart."""
    ranks = HostRanksInTurn()

    ranks.every(lambda cache: cache.reset())

    assert looked_up(ranks, "a") == set()
    assert persisted(ranks, "b") == set()
    assert ranks.every(lambda cache: cache.match_host("c", PROMPT)) == len(PROMPT)


def test_storage_has_nothing_to_do_with_a_namespace_that_is_of_this_life_alone() -> None:
    ranks = HostRanksInTurn()

    place = NO_PERSIST_PREFIX + "anything"

    prefetching = ranks.every(lambda cache: cache.prefetch("a", PROMPT, place))
    ranks.every(lambda cache: cache.back_up("a", PROMPT, range(4), place))
    ranks.every(lambda cache: cache.begin_backups())
    ranks.complete()
    orders = [each for executor in ranks.executors for each in executor.given(Put)]
    ranks.settle()

    assert not prefetching
    assert orders == []
    assert ranks.every(lambda cache: cache.match(PROMPT, place)).host_tokens == len(PROMPT)


def test_a_version_that_was_named_is_found_again_in_another_life() -> None:
    one, other = HostRanksInTurn(), HostRanksInTurn()

    one.every(lambda cache: cache.reset())
    for ranks in (one, other):
        ranks.every(lambda cache: cache.reset("step 100"))

    written = persisted(one, "a")
    assert len(written) == 4
    assert written <= looked_up(other, "a")


def test_two_versions_share_no_key() -> None:
    ranks = HostRanksInTurn()
    keys: list[set[bytes]] = []
    for version in ("step 100", "step 200"):
        ranks.every(partial(HostCache.reset, weights_version=version))
        keys.append(looked_up(ranks, version))

    assert keys[0].isdisjoint(keys[1])


def test_a_pin_ends_with_a_reset_and_so_do_its_pages() -> None:
    ranks = HostRanksInTurn(host_pages=8, store=False)
    published(ranks)
    assert ranks.every(lambda cache: cache.pin("kept", PROMPT, ttl_s=1000.0)) == len(PROMPT)

    ranks.every(lambda cache: cache.reset())

    assert ranks.free(HOST) == 8
    published(ranks)
    assert ranks.every(lambda cache: cache.pin("kept", PROMPT, ttl_s=1000.0)) == len(PROMPT)
    ranks.check()


def test_a_weights_version_must_be_text() -> None:
    ranks = HostRanksInTurn(1)

    with pytest.raises(UsageError, match="a weights version must be text"):
        ranks.caches[0].reset(7)  # type: ignore[arg-type]

    assert ranks.caches[0].inspection.requests.generation == 0


def test_an_idle_step_ends_with_its_own_verdict_at_either_depth() -> None:
    """An idle step waits for its own verdict, because there is no forward pass to overlap with."""
    ranks = HostRanksInTurn(1, depth=1)
    cache = ranks.caches[0]
    cache.prefetch("r", PROMPT)
    ranks.executors[0].complete()

    cache.begin_step()
    cache.end_step(idle_s=0.001)

    assert cache.prefetch_done("r")
    assert cache.stats().steps == cache.stats().collectives == 1


def test_one_line_names_the_rank_that_lacks_what_the_others_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning names the rank whose store lacks a page that the other ranks' stores have."""
    ranks = HostRanksInTurn()
    caplog.set_level(logging.INFO, logger="lockstep")
    for name, answers in (("missed by all", (2, 2)), ("lost\nby one", (3, 1))):
        ranks.every(lambda cache: cache.prefetch(name, PROMPT))
        for executor, pages in zip(ranks.executors, answers, strict=True):
            executor.reports.append(Answered(executor.take(LookUp)[0].operation, pages))
        ranks.step()

    [record] = [each for each in caplog.records if each.name == "lockstep"]
    assert record.levelno == logging.WARNING
    assert record.message.startswith("rank 1 lacks page 1 of request 'lost\\nby one' (key ")


def test_each_facade_refuses_the_other_s_configuration() -> None:
    layout = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=1, elements=1),))
    owned = CacheConfig(model="m", layout=layout, device_pages=4, host_pages=4)
    lent = HostCacheConfig(model="m", layout=layout, host_pages=4)

    with pytest.raises(ConfigError, match="a HostCache needs a HostCacheConfig, not a CacheConfig"):
        HostCache.open(owned, {}, InProcessGroup(1).member(0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a Cache needs a CacheConfig, not a HostCacheConfig"):
        Cache.open(lent, InProcessGroup(1).member(0))  # type: ignore[arg-type]


def test_a_rank_that_ends_by_an_error_of_its_own_waits_for_nobody() -> None:
    ranks = HostRanksInTurn(depth=1)
    ranks.step()
    for cache in ranks.caches:
        cache.begin_step()

    ranks.caches[0].abandon()
    ranks.caches[0].close()

    assert ranks.executors[0].closed
    with pytest.raises(GroupError):
        ranks.caches[1].step(idle_s=0.001)


def test_nobody_waits_for_the_pages_of_a_copy_that_is_quarantined() -> None:
    """Rule R10: pages of a quarantined copy do not count as pending frees.

    If they did, an engine would wait for them forever.
    """
    ranks = HostRanksInTurn()
    backup = begin_backup(ranks)
    assert not ranks.every(lambda cache: cache.release("r"))
    assert ranks.every(lambda cache: cache.pending_frees)

    ranks.executors[0].reports.append(TransferEnded(backup, ok=False))
    ranks.step()
    ranks.executors[0].reports.append(QuiesceExpired(backup))
    ranks.step()

    assert ranks.phase(backup) == "QUARANTINED"
    assert not ranks.every(lambda cache: cache.pending_frees)
    assert not ranks.every(lambda cache: cache.finish_copies())
    ranks.report(Quiesced(backup))
    ranks.step()
    assert ranks.every(lambda cache: cache.pending_frees)
    assert ranks.every(lambda cache: cache.collect_freed()) == ["r"]
