"""Handoffs to and from pages that an engine lends, where something goes wrong on the way."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lockstep.ranks.cache import Cache
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.replica.extent import Extent
from lockstep.ranks.replica.requests import LoadState
from lockstep.ranks.replica.tree.node import HOST
from lockstep.small_engine.contents import KeyedTokens
from tests.kit.ranks.lending_engine import lending
from tests.kit.ranks.pair import NAME, PAGE_TOKENS, Pair
from tests.kit.ranks.served_group import ServedGroup, keyed

LENT = (True, True)
TOKENS = keyed(11, 5 * PAGE_TOKENS + 7, PAGE_TOKENS)
LENGTH = len(TOKENS.ids)
CHUNKS = ((0, 2 * PAGE_TOKENS), (2 * PAGE_TOKENS, LENGTH))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def computed(pair: Pair) -> None:
    """Let the first group compute a request."""
    pair.prefill.admit(NAME, KeyedTokens(TOKENS.ids[:0], PAGE_TOKENS), reserve=LENGTH)
    for start, stop in CHUNKS:
        pair.prefill.compute(NAME, TOKENS, start, stop)
        pair.offered(TOKENS, stop)


def finished(pair: Pair) -> int:
    """Let the second group go on with what it has, and compute the rest; return how many are wrong."""
    cached = pair.decode.admit(NAME, TOKENS, reserve=LENGTH)
    if cached < LENGTH:
        pair.decode.compute(NAME, TOKENS, cached, LENGTH)
    return pair.decode.wrong_pages(NAME, TOKENS, LENGTH)


def flip(group: ServedGroup, pool: str, rank: int) -> None:
    """Change a byte in each host page of a pool on one rank."""
    executor = group.caches[rank].inspection.executor
    assert isinstance(executor, RankExecutor)
    memory = executor.host_pools[pool].bytes_tensor
    memory[:, 0] ^= 1


def free_again(group: ServedGroup) -> list[bool]:
    """Let go of the request and wait; say of each pool on the host whether only the tree has pages."""
    group.ask(lambda cache: cache.abort(NAME))
    group.until(lambda cache: not cache.inspection.in_flight)
    group.ask(lambda cache: cache.inspection.check())

    def unused(cache: Cache) -> list[bool]:
        residence = cache.inspection.prefixes.residence
        return [
            pool.free + residence.tree_pages[HOST][index] == pool.capacity
            and not residence.holds.kept_pages[HOST][index]
            for index, pool in enumerate(residence.pools[HOST])
        ]

    return group.ask(unused)


@pytest.mark.parametrize("pool", ["kv", "window", "state"])
@pytest.mark.parametrize("store", [None, "memory://lent-flips"], ids=["directly", "by a store"])
def test_a_page_that_is_flipped_where_it_was_computed_is_never_computed_with(
    stack: ExitStack, pool: str, store: str | None
) -> None:
    pair = Pair(stack, "hybrid-all", (2, 2), store=store, lends=LENT)
    computed(pair)
    assert pair.prefill.ask(lambda cache: cache.retract(NAME, TOKENS.ids))
    pair.prefill.until(lambda cache: cache.load_state(NAME) is LoadState.SAVED)
    flip(pair.prefill, pool, rank=1)
    for _ in range(5):
        pair.prefill.ask(lambda cache: pair.give(cache, TOKENS.ids))
        pair.prefill.until(lambda cache: cache.inspection.idle)
    pair.prefetched(TOKENS, LENGTH, Extent.ALL)
    assert finished(pair) == 0


def test_a_tail_that_was_lost_costs_no_more_than_what_a_match_cannot_use(stack: ExitStack) -> None:
    pair = Pair(stack, "llama", (2, 2), store=None, lends=LENT)
    computed(pair)
    pair.prefetched(TOKENS, LENGTH, Extent.ALL)
    assert pair.decode.ask(lambda c: c.received(NAME, TOKENS.ids)) == LENGTH - LENGTH % PAGE_TOKENS
    assert finished(pair) == 0


@pytest.mark.parametrize("lends", [(True, True), (True, False), (False, True)], ids=str)
def test_a_request_that_is_aborted_while_it_is_handed_over_leaves_nothing_behind(
    stack: ExitStack, lends: tuple[bool, bool]
) -> None:
    def prefetching(pair: Pair) -> None:
        source, ids = pair.source, TOKENS.ids
        pair.decode.ask(lambda c: c.prefetch(NAME, ids, extent=Extent.ALL, source=source))

    def brought(pair: Pair) -> None:
        pair.prefetched(TOKENS, LENGTH, Extent.ALL)

    def loading(pair: Pair) -> None:
        brought(pair)
        pair.decode.ask(lambda cache: cache.load_back(NAME, TOKENS.ids, reserve_tokens=LENGTH))

    def going_on(pair: Pair) -> None:
        brought(pair)
        assert pair.decode.admit(NAME, TOKENS, reserve=LENGTH) == LENGTH

    left: list[list[bool]] = []
    for stage in (prefetching, brought, loading, going_on):
        pair = Pair(stack, "hybrid-all", (2, 1), store=None, lends=lends)
        computed(pair)
        pair.save(TOKENS)
        stage(pair)
        left += [free_again(pair.decode), free_again(pair.prefill)]

    assert left == [[True] * 3] * 8


@pytest.mark.parametrize("stage", ["computing", "saving", "saved"])
def test_a_request_that_is_aborted_where_it_is_computed_leaves_nothing_behind(
    stack: ExitStack, stage: str
) -> None:
    pair = Pair(stack, "hybrid-all", (2, 1), store=None, lends=LENT)
    computed(pair)
    begun = stage == "computing" or pair.prefill.ask(lambda c: c.retract(NAME, TOKENS.ids))
    saved = LoadState.SAVED if stage == "saved" else pair.prefill.ask(lambda c: c.load_state(NAME))
    pair.prefill.until(lambda cache: cache.load_state(NAME) is saved)
    assert begun
    assert free_again(pair.prefill) == [True] * 3


def test_an_offer_whose_time_is_over_is_lost_when_its_request_resumes(stack: ExitStack) -> None:
    pair = Pair(stack, "hybrid-all", (2, 1), store=None, lends=LENT)
    computed(pair)
    pair.save(TOKENS)
    pair.prefill.ask(lambda cache: cache.serve(NAME, TOKENS.ids, ttl_s=0.001))
    pair.prefill.until(lambda cache: not cache.inspection.in_flight)

    def resumed(cache: Cache) -> str:
        return f"{cache.load_state(NAME).value}, {lending(cache).come_back(NAME, LENGTH)}"

    assert pair.prefill.ask(resumed) == "saved, lost"
    assert pair.prefill.admit(NAME, TOKENS, reserve=LENGTH) <= LENGTH - LENGTH % PAGE_TOKENS


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("lends", [(True, True), (False, True)], ids=str)
def test_a_request_that_ends_serves_what_a_match_of_its_whole_pages_needs_of_a_window(
    stack: ExitStack, lends: tuple[bool, bool], ranks: tuple[int, int]
) -> None:
    pair = Pair(stack, "gemma", ranks, store=None, lends=lends)
    whole = LENGTH - LENGTH % PAGE_TOKENS
    ids = TOKENS.ids[:whole]
    computed(pair)
    pair.prefetched(TOKENS, LENGTH, Extent.PAGES)
    without = pair.decode.ask(lambda cache: cache.received(NAME, TOKENS.ids))
    pair.prefill.until(lambda cache: cache.serve(NAME, ids, ttl_s=60, ends=True) == whole)

    pair.prefetched(TOKENS, LENGTH, Extent.PAGES)

    assert without < pair.decode.ask(lambda cache: cache.received(NAME, TOKENS.ids)) == whole
    assert finished(pair) == 0
    assert free_again(pair.decode) == free_again(pair.prefill) == [True] * 2
