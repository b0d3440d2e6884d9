"""Each missed token has one cause, and hits and misses add up to the tokens requested."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from lockstep.coordinator.ballot import Answered
from lockstep.ranks.group.member.cache_stats import ReplicaStats
from lockstep.ranks.protocol.config import Bounds
from lockstep.ranks.protocol.events import MissedTokens
from lockstep.ranks.protocol.orders import LookUp
from lockstep.ranks.replica.core.misses import NOTHING_SOUGHT, SLOTS_MIN, Misses, Sought
from lockstep.ranks.replica.tree.tokens import page_keys, token_hash
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, RanksInTurn, prompt

ASKED = prompt(4)
TOKENS = len(ASKED)


def counted(ranks: HostRanksInTurn | RanksInTurn) -> ReplicaStats:
    """Return the ranks' equal statistics; check that hits and misses add up to all tokens requested."""
    stats = ranks.every(lambda cache: cache.stats().replica)
    hit, missed = sum(stats.hit_tokens.values()), sum(stats.missed_tokens.values())
    assert hit + missed == stats.asked_tokens
    return stats


def serve(ranks: HostRanksInTurn, name: str, tokens: list[int], namespace: str = "") -> None:
    ranks.every(lambda cache: cache.admit(name, tokens, namespace))
    pages = range(len(tokens) // PAGE_TOKENS)
    ranks.every(lambda cache: cache.back_up(name, tokens, pages, namespace))
    ranks.every(lambda cache: cache.release(name))
    ranks.settle()


def load_and_admit(ranks: HostRanksInTurn, name: str, tokens: list[int]) -> None:
    hit = ranks.every(lambda cache: cache.match_host(name, tokens))
    if hit:
        ranks.every(lambda cache: cache.load(name, tokens[:hit], range(hit // PAGE_TOKENS)))
        ranks.settle()
    ranks.every(lambda cache: cache.admit(name, tokens, device_tokens=hit))


def missed_by(ranks: HostRanksInTurn, tokens: list[int], namespace: str = "") -> dict[str, int]:
    before = counted(ranks).missed_tokens
    ranks.every(lambda cache: cache.admit("asks", tokens, namespace))
    now = counted(ranks).missed_tokens
    assert sum(now.values()) - sum(before.values()) == len(tokens)
    return {cause: n - before.get(cause, 0) for cause, n in now.items() if n > before.get(cause, 0)}


def test_what_nobody_has_asked_for_was_never_seen() -> None:
    assert missed_by(HostRanksInTurn(store=False), ASKED) == {"never_seen": TOKENS}


def test_requests_that_arrive_together_have_not_seen_each_other() -> None:
    ranks = HostRanksInTurn(store=False)
    ranks.every(lambda cache: cache.admit("first", ASKED))
    ranks.every(lambda cache: cache.back_up("first", ASKED, range(4)))

    assert missed_by(ranks, ASKED) == {"never_seen": TOKENS}


def for_room(ranks: HostRanksInTurn) -> None:
    serve(ranks, "other", prompt(4, start=500))


def dropped(ranks: HostRanksInTurn) -> None:
    ranks.every(lambda cache: cache.drop())


@pytest.mark.parametrize("leave", [for_room, dropped])
def test_what_has_left_host_memory_was_evicted_and_what_follows_it_is_new(
    leave: Callable[[HostRanksInTurn], None],
) -> None:
    ranks = HostRanksInTurn(store=False, host_pages=4)
    serve(ranks, "first", ASKED)
    leave(ranks)

    missed = missed_by(ranks, [*ASKED[:-PAGE_TOKENS], *prompt(2, start=900)])

    assert missed == {"evicted": 3 * PAGE_TOKENS, "never_seen": 2 * PAGE_TOKENS}


def test_what_was_computed_beyond_the_prompt_counts_as_evicted_too() -> None:
    ranks = HostRanksInTurn(store=False)
    ranks.every(lambda cache: cache.admit("first", ASKED[:PAGE_TOKENS]))
    ranks.every(lambda cache: cache.back_up("first", ASKED, range(4)))
    ranks.every(lambda cache: cache.release("first"))
    ranks.settle()
    dropped(ranks)

    assert missed_by(ranks, ASKED) == {"evicted": TOKENS}


def test_what_another_tenant_or_former_weights_have_is_under_another_key() -> None:
    ranks = HostRanksInTurn(store=False)
    serve(ranks, "first", ASKED, "tenant")

    assert missed_by(ranks, ASKED, "other tenant") == {"other_key": TOKENS}
    ranks.every(lambda cache: cache.reset())
    ranks.every(lambda cache: cache.release("asks"))
    assert missed_by(ranks, ASKED, "tenant") == {"other_key": TOKENS}


@pytest.mark.parametrize("found", range(5))
def test_what_storage_had_and_does_not_bring_is_lost(found: int) -> None:
    """Pages that storage has lost count as misses, and pages that storage returns count as hits."""
    ranks = HostRanksInTurn()
    serve(ranks, "first", ASKED)
    dropped(ranks)
    longer = [*ASKED, *prompt(1, start=900)]
    ranks.every(lambda cache: cache.prefetch("again", longer))
    for executor in ranks.executors:
        [lookup] = executor.take(LookUp)
        executor.reports.append(Answered(lookup.operation, found))
    ranks.settle()
    never_seen = counted(ranks).missed_tokens["never_seen"]

    load_and_admit(ranks, "again", longer)

    stats = counted(ranks)
    assert stats.hit_tokens == {"device": 0, "host": 0, "storage": found * PAGE_TOKENS}
    assert stats.missed_tokens["lost"] == (4 - found) * PAGE_TOKENS
    assert stats.missed_tokens["never_seen"] == never_seen + PAGE_TOKENS


def test_what_one_rank_lacks_or_nobody_waited_for_is_lost_though_another_group_has_written_it() -> (
    None
):
    ranks = HostRanksInTurn()
    ranks.every(lambda cache: cache.prefetch("asks", ASKED))
    for executor, found in zip(ranks.executors, (3, 1), strict=True):
        [lookup] = executor.take(LookUp)
        executor.reports.append(Answered(lookup.operation, found))
    ranks.step()

    missed = missed_by(ranks, ASKED)

    assert missed == {"lost": 3 * PAGE_TOKENS, "never_seen": PAGE_TOKENS}


def test_what_host_memory_had_no_room_for_counts_as_evicted() -> None:
    ranks = HostRanksInTurn(host_pages=2, bounds=Bounds(prefetch_pages=4))
    ranks.every(lambda cache: cache.prefetch("asks", ASKED))
    ranks.complete(lambda key: True)
    ranks.settle()

    load_and_admit(ranks, "asks", ASKED)

    stats = counted(ranks)
    assert stats.missed_pages == {"no_room": 2}
    assert stats.missed_tokens["evicted"] == 2 * PAGE_TOKENS


def test_a_cache_with_device_pages_of_its_own_counts_as_it_admits() -> None:
    ranks = RanksInTurn(store=False, device_pages=8, host_pages=0)
    ranks.compute("first", ASKED)
    ranks.compute("other", prompt(6, start=500))
    ranks.compute("again", ASKED)

    stats = counted(ranks)

    assert stats.hit_tokens["device"] == 2 * PAGE_TOKENS
    assert stats.missed_tokens == {
        "lost": 0,
        "evicted": PAGE_TOKENS,
        "other_key": 0,
        "never_seen": stats.asked_tokens - 3 * PAGE_TOKENS,
    }


def test_the_engine_s_own_hits_and_loads_are_told_apart_where_it_admits() -> None:
    ranks = HostRanksInTurn(store=False)
    serve(ranks, "first", ASKED)
    ranks.every(lambda cache: cache.match_host("again", ASKED, device_tokens=PAGE_TOKENS))
    tokens = ASKED[: 3 * PAGE_TOKENS]
    ranks.every(lambda cache: cache.load("again", tokens, [7, 8], device_tokens=PAGE_TOKENS))
    ranks.settle()

    ranks.every(lambda cache: cache.admit("again", ASKED, device_tokens=len(tokens)))

    stats = counted(ranks)
    assert (stats.admissions, stats.asked_tokens) == (2, 2 * TOKENS)
    assert stats.hit_tokens == {"device": PAGE_TOKENS, "host": 2 * PAGE_TOKENS, "storage": 0}
    assert stats.missed_tokens["evicted"] == PAGE_TOKENS


def test_what_storage_had_under_former_weights_is_not_lost_under_others() -> None:
    ranks = HostRanksInTurn()
    serve(ranks, "first", ASKED)
    dropped(ranks)
    ranks.every(lambda cache: cache.prefetch("again", ASKED))
    ranks.every(lambda cache: cache.reset())
    ranks.settle()

    load_and_admit(ranks, "again", ASKED)

    missed = counted(ranks).missed_tokens
    assert missed == {"lost": 0, "evicted": 0, "other_key": TOKENS, "never_seen": TOKENS}


def test_what_was_brought_for_a_preempted_request_is_from_storage_once() -> None:
    ranks = HostRanksInTurn()
    prefetched(ranks)
    load_and_admit(ranks, "r", ASKED)
    ranks.every(lambda cache: cache.fence("r"))

    load_and_admit(ranks, "r", ASKED)

    assert counted(ranks).hit_tokens == {"device": 0, "host": TOKENS, "storage": TOKENS}


def fail_copies(ranks: HostRanksInTurn | RanksInTurn) -> None:
    for executor in ranks.executors:
        executor.fail()
    ranks.settle()


def prefetched(ranks: HostRanksInTurn | RanksInTurn) -> None:
    ranks.every(lambda cache: cache.prefetch("r", ASKED))
    ranks.settle(lambda key: True)


def backed_up(ranks: HostRanksInTurn) -> None:
    ranks.every(lambda cache: cache.back_up("first", ASKED, range(4)))
    ranks.settle()


def evicted_from_device(ranks: RanksInTurn) -> None:
    ranks.compute("first", ASKED)
    ranks.compute("other", prompt(8, start=500))


@pytest.mark.parametrize("bring", [prefetched, backed_up])
def test_what_a_load_has_failed_to_bring_is_lost_and_no_hit(
    bring: Callable[[HostRanksInTurn], None],
) -> None:
    ranks = HostRanksInTurn()
    bring(ranks)
    longer = [*ASKED, *prompt(1, start=900)]
    ranks.every(lambda cache: cache.match_host("r", longer))
    ranks.every(lambda cache: cache.load("r", ASKED, range(4)))
    fail_copies(ranks)

    ranks.every(lambda cache: cache.admit("r", longer))

    stats = counted(ranks)
    assert sum(stats.hit_tokens.values()) == 0
    assert (stats.missed_tokens["lost"], stats.missed_tokens["never_seen"]) == (TOKENS, PAGE_TOKENS)


def test_what_a_load_has_brought_before_one_that_fails_is_a_hit_of_the_host() -> None:
    ranks = HostRanksInTurn(store=False)
    backed_up(ranks)
    half = len(ASKED) // 2
    ranks.every(lambda cache: cache.match_host("r", ASKED))
    ranks.every(lambda cache: cache.load("r", ASKED[:half], range(2)))
    ranks.settle()
    ranks.every(lambda cache: cache.load("r", ASKED, range(2, 4), device_tokens=half))
    fail_copies(ranks)

    ranks.every(lambda cache: cache.admit("r", ASKED, device_tokens=half))

    stats = counted(ranks)
    assert stats.hit_tokens == {"device": 0, "host": half, "storage": 0}
    assert stats.missed_tokens["lost"] == half


@pytest.mark.parametrize("bring", [prefetched, evicted_from_device])
def test_a_cache_with_device_pages_counts_a_request_whose_load_failed_as_it_computes(
    bring: Callable[[RanksInTurn], None],
) -> None:
    ranks = RanksInTurn(device_pages=8)
    bring(ranks)
    before = counted(ranks)
    longer = [*ASKED, *prompt(1, start=900)]
    ranks.every(lambda cache: cache.load_back("r", longer, reserve_tokens=len(longer)))
    fail_copies(ranks)
    ranks.every(lambda cache: cache.load_back("r", longer, reserve_tokens=len(longer)))

    stats = counted(ranks)
    assert stats.asked_tokens - before.asked_tokens == len(longer)
    assert sum(stats.hit_tokens.values()) == sum(before.hit_tokens.values())
    assert stats.missed_tokens["lost"] == TOKENS
    assert stats.missed_tokens["never_seen"] - before.missed_tokens["never_seen"] == PAGE_TOKENS


@pytest.mark.parametrize("seed", range(8))
def test_drawn_histories_add_up(seed: int) -> None:
    """Each token of a random prompt is a hit, or a miss with one cause."""
    generator, misses = random.Random(seed), Misses()
    uncached, missed = list[int](), list[MissedTokens]()
    for _ in range(60):
        tokens = generator.choices((1, 2), k=generator.randint(0, 6 * PAGE_TOKENS))
        data = np.array(tokens, dtype="<i4").tobytes()
        keys = page_keys(b"seed", data, PAGE_TOKENS)
        misses.stored(keys[: generator.randint(-9, len(keys))])
        misses.computed(generator.choice("abcdef"), token_hash(data))
        misses.settle()
        failed = generator.choice((0, 0, 2))
        place, sought = generator.choice("abc"), Sought(0, keys, generator.random() < 0.3, failed)
        cached = generator.randint(0, len(tokens))
        uncached.append(len(tokens) - cached)
        by_cause, seen = misses.count(place, data, PAGE_TOKENS, cached, sought)
        missed.append(by_cause)
        misses.record_lookup(seen)

    assert [sum(each) for each in missed] == uncached
    assert min(map(min, missed)) == 0
    assert min(map(sum, zip(*missed, strict=True))) > 0


def test_what_was_seen_long_ago_is_forgotten_in_bounded_memory() -> None:
    misses = Misses()
    data = np.arange(4 * PAGE_TOKENS, dtype="<i4").tobytes()
    misses.record_lookup(misses.count("a", data, PAGE_TOKENS, 0, NOTHING_SOUGHT)[1])
    misses.settle()
    known, _ = misses.count("a", data, PAGE_TOKENS, 0, NOTHING_SOUGHT)
    others = np.random.default_rng(0).integers(0, 1 << 63, (20 * SLOTS_MIN, 4), dtype=np.uint64)
    misses.stored([each.tobytes() for each in others])

    forgotten, _ = misses.count("a", data, PAGE_TOKENS, 0, NOTHING_SOUGHT)

    assert (known, forgotten) == (MissedTokens(evicted=TOKENS), MissedTokens(never_seen=TOKENS))
