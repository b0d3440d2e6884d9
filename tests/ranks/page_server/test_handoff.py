"""Handoff: one group computes a prompt and another continues, with real caches, bytes and sockets."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.replica.tree.node import HOST
from lockstep.small_engine.profiles import PROFILES
from tests.kit.ranks.pair import NAME, PAGE_TOKENS, Pair, config_of
from tests.kit.ranks.served_group import ServedGroup, keyed

OWNED, LENT = (False, False), (True, True)
LENDS = {
    "caches": OWNED,
    "from lent pages": (True, False),
    "to lent pages": (False, True),
    "lent pages": LENT,
}
"""Whether the engine owns its device pages, for each case: first on the prefill side, then on the
decode side."""
BOTH_ENDS = pytest.mark.parametrize("lends", LENDS.values(), ids=LENDS)
HALF, WHOLE = 4 * PAGE_TOKENS, 8 * PAGE_TOKENS
TOKENS = keyed(1, WHOLE + 7, PAGE_TOKENS)


def unused(cache: Cache) -> list[bool]:
    """Return for each host pool whether all its pages are free or evictable."""
    allocator = cache.inspection.prefixes.allocator
    return [
        pool.free + allocator.tree_pages[HOST][index] == pool.capacity
        and not allocator.ref_counts.kept_pages[HOST][index]
        for index, pool in enumerate(allocator.pools[HOST])
    ]


def free_again(group: ServedGroup) -> list[bool]:
    """Abort the request and let I/O end; return whether all host pages are unused, by rank and pool."""
    group.ask(lambda cache: cache.abort(NAME))
    group.until(lambda cache: not cache.inspection.in_flight)
    group.ask(lambda cache: cache.inspection.check())
    return group.ask(unused)


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2), (4, 2)], ids=str)
@BOTH_ENDS
def test_a_prompt_goes_on_at_any_tp_size_with_all_its_whole_pages(
    stack: ExitStack, ranks: tuple[int, int], lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, "hybrid-all", ranks, lends=lends)
    pair.compute(TOKENS, HALF, WHOLE)

    cached = pair.goes_on(TOKENS)

    assert cached == WHOLE
    assert pair.wrong_pages(TOKENS, cached) == 0
    assert free_again(pair.prefill) == free_again(pair.decode) == [True] * 3


def opened_with(store: str) -> ServedGroup:
    return ServedGroup(replace(config_of("hybrid-all"), peers=None, store=store), 1)


def attached_to(store: str) -> ServedGroup:
    group = ServedGroup(replace(config_of("hybrid-all"), peers=None), 1)
    outcome = group.caches[0].attach_store(store)
    group.until(lambda _: outcome.done())
    outcome.result()
    return group


@pytest.mark.parametrize("reader", [opened_with, attached_to])
def test_a_cache_whose_store_is_another_group_finds_what_that_group_serves(
    stack: ExitStack, reader: Callable[[str], ServedGroup]
) -> None:
    pair = Pair(stack, "hybrid-all", (2, 1))
    pair.compute(TOKENS, HALF, WHOLE)
    reading = stack.enter_context(closing(reader(pair.source)))

    reading.ask(lambda cache: cache.prefetch(NAME, TOKENS.ids))
    reading.until(lambda cache: cache.prefetch_done(NAME))

    assert reading.admit(NAME, TOKENS, reserve=len(TOKENS.ids)) == WHOLE
    reading.compute(NAME, TOKENS, WHOLE, len(TOKENS.ids))
    assert reading.wrong_pages(NAME, TOKENS, len(TOKENS.ids)) == 0


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "hybrid-all"])
@pytest.mark.parametrize("lends", [OWNED, LENT], ids=["caches", "lent pages"])
def test_every_kind_of_model_is_handed_over(
    stack: ExitStack, profile: str, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, profile, (2, 1), lends=lends)
    pair.compute(TOKENS, HALF, WHOLE)

    cached = pair.goes_on(TOKENS)

    assert cached == WHOLE
    assert pair.wrong_pages(TOKENS, cached) == 0


@pytest.mark.parametrize("lends", [OWNED, LENT], ids=["caches", "lent pages"])
def test_what_another_group_does_not_serve_yet_is_computed(
    stack: ExitStack, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, "llama", (2, 2), lends=lends)
    pair.compute(TOKENS, HALF)

    cached = pair.goes_on(TOKENS)

    assert cached == HALF
    assert pair.wrong_pages(TOKENS, cached) == 0


def test_a_group_that_has_ended_costs_its_readers_nothing_but_what_it_had(
    stack: ExitStack,
) -> None:
    pair = Pair(stack, "llama", (2, 2))
    pair.prefill.close()

    assert pair.goes_on(TOKENS) == 0


def test_a_group_of_other_weights_finds_nothing_to_read(stack: ExitStack) -> None:
    pair = Pair(stack, "llama", (1, 1))
    pair.compute(TOKENS, WHOLE)
    other = replace(config_of("llama"), weights_version="1")
    pair.decode = stack.enter_context(closing(ServedGroup(other, 1)))

    assert pair.goes_on(TOKENS) == 0


@pytest.mark.parametrize("pool", ["kv", "window", "state"])
def test_a_page_that_is_flipped_where_it_was_computed_is_never_computed_with(
    stack: ExitStack, pool: str
) -> None:
    pair = Pair(stack, "hybrid-all", (2, 2), lends=LENT)
    pair.compute(TOKENS, HALF, WHOLE)
    assert pair.goes_on(TOKENS) == WHOLE
    flip(pair.prefill, pool, rank=1)
    pair.decode = stack.enter_context(closing(ServedGroup(config_of("hybrid-all"), 2)))

    cached = pair.goes_on(TOKENS)

    assert cached < WHOLE
    assert pair.wrong_pages(TOKENS, cached) == 0


def flip(group: ServedGroup, pool: str, rank: int) -> None:
    executor = group.caches[rank].inspection.executor
    assert isinstance(executor, RankExecutor)
    executor.host_pools[pool].bytes_tensor[:, 0] ^= 1


def prefetching(pair: Pair) -> None:
    pair.decode.ask(lambda c: c.prefetch(NAME, TOKENS.ids, source=pair.source))


def loading(pair: Pair) -> None:
    pair.prefetched(TOKENS)
    pair.decode.ask(lambda c: c.load_back(NAME, TOKENS.ids, reserve_tokens=len(TOKENS.ids)))


@pytest.mark.parametrize("lends", [LENT, (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("stage", [prefetching, loading])
def test_a_request_that_is_aborted_while_it_is_handed_over_leaves_nothing_behind(
    stack: ExitStack, lends: tuple[bool, bool], stage: Callable[[Pair], None]
) -> None:
    pair = Pair(stack, "hybrid-all", (2, 1), lends=lends)
    pair.compute(TOKENS, HALF, WHOLE)

    stage(pair)

    assert free_again(pair.decode) == free_again(pair.prefill) == [True] * 3


@pytest.mark.parametrize(
    ("source", "peers", "message"),
    [
        ("peer://there:1", False, "set `peers` when the cache is opened"),
        ("peer://there:1?secret=hush", True, "set the secret in `peers`"),
        ("peer://me:hush@there:1", True, "set the secret in `peers`"),
    ],
)
def test_a_source_that_cannot_be_or_tells_a_secret_is_refused_by_name(
    stack: ExitStack, source: str, peers: bool, message: str
) -> None:
    config = config_of("llama") if peers else replace(config_of("llama"), peers=None)
    group = stack.enter_context(closing(ServedGroup(config, 1)))

    def refused(cache: Cache) -> str:
        with pytest.raises(UsageError) as caught:
            cache.prefetch(NAME, [1] * PAGE_TOKENS, source=source)
        return str(caught.value)

    refusal = group.ask(refused)
    assert message in refusal
    assert "hush" not in refusal
    assert not group.ask(lambda cache: cache.inspection.in_flight)
