"""Requests that one group computes and another goes on with: real caches, bytes and sockets."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.cache import Cache
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.replica.extent import Extent
from lockstep.ranks.replica.requests import LoadState
from lockstep.small_engine.contents import KeyedTokens
from lockstep.small_engine.profiles import PROFILES
from tests.kit.ranks.pair import NAME, PAGE_TOKENS, Pair, config_of, hand_over
from tests.kit.ranks.served_group import ServedGroup, keyed

OWNED, LENT = (False, False), (True, True)
LENDS = {
    "caches": OWNED,
    "from lent pages": (True, False),
    "to lent pages": (False, True),
    "lent pages": LENT,
}
"""Whose engines own their device pages: that which computes, and that which goes on."""
BOTH_ENDS = pytest.mark.parametrize("lends", LENDS.values(), ids=LENDS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("store", [None, "memory://handing-over"], ids=["directly", "by a store"])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2), (4, 2)], ids=str)
@BOTH_ENDS
def test_a_request_goes_on_at_any_tp_size_with_all_that_it_had(
    stack: ExitStack, ranks: tuple[int, int], store: str | None, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, "hybrid-all", ranks, store=store, lends=lends)
    tokens = keyed(1, 5 * PAGE_TOKENS + 7, PAGE_TOKENS)
    assert hand_over(pair, tokens, (2 * PAGE_TOKENS, 4 * PAGE_TOKENS)) == len(tokens.ids)
    assert pair.decode.wrong_pages(NAME, tokens, len(tokens.ids)) == 0


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "hybrid-all"])
@pytest.mark.parametrize("rest", [0, 3], ids=["at a page", "within a page"])
@BOTH_ENDS
def test_every_kind_of_model_is_handed_over_whole(
    stack: ExitStack, profile: str, rest: int, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, profile, (2, 1), store=None, lends=lends)
    tokens = keyed(2, 4 * PAGE_TOKENS + rest, PAGE_TOKENS)
    assert hand_over(pair, tokens, (2 * PAGE_TOKENS,)) == len(tokens.ids)
    assert pair.decode.wrong_pages(NAME, tokens, len(tokens.ids)) == 0


@pytest.mark.parametrize("store", [None, "memory://at-once"], ids=["directly", "by a store"])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("lends", [OWNED, LENT], ids=["caches", "lent pages"])
def test_a_request_of_which_nothing_was_brought_before_is_handed_over_whole(
    stack: ExitStack, profile: str, store: str | None, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, profile, (2, 1), store=store, lends=lends)
    # Longer than the window of gpt-oss, of which the last pages alone are brought.
    tokens = keyed(8, 11 * PAGE_TOKENS + 3, PAGE_TOKENS)
    length = len(tokens.ids)
    pair.prefill.admit(NAME, KeyedTokens(tokens.ids[:0], PAGE_TOKENS), reserve=length)
    for start, stop in pairwise((0, 3 * PAGE_TOKENS, 7 * PAGE_TOKENS, length)):
        pair.prefill.compute(NAME, tokens, start, stop)
        pair.offered(tokens, stop)
    pair.save(tokens)
    pair.prefetched(tokens, length, Extent.ALL)
    assert pair.decode.admit(NAME, tokens, reserve=length + PAGE_TOKENS) == length
    assert pair.decode.wrong_pages(NAME, tokens, length) == 0


@pytest.mark.parametrize("lends", [OWNED, LENT], ids=["caches", "lent pages"])
def test_what_was_served_is_free_again_when_the_request_leaves(
    stack: ExitStack, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, "hybrid-all", (2, 2), store=None, lends=lends)
    tokens = keyed(3, 3 * PAGE_TOKENS + 5, PAGE_TOKENS)
    hand_over(pair, tokens, (PAGE_TOKENS,))
    pair.prefill.ask(lambda cache: cache.release(NAME))
    pair.prefill.until(lambda cache: not cache.inspection.in_flight)
    pair.prefill.ask(lambda cache: cache.inspection.check())
    assert pair.prefill.kept() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("lends", [OWNED, LENT], ids=["caches", "lent pages"])
def test_a_request_that_another_group_has_not_offered_whole_computes_the_rest(
    stack: ExitStack, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, "llama", (2, 2), store=None, lends=lends)
    tokens = keyed(4, 4 * PAGE_TOKENS + 5, PAGE_TOKENS)
    pair.prefill.admit(NAME, KeyedTokens(tokens.ids[:0], PAGE_TOKENS), reserve=len(tokens.ids))
    pair.prefill.compute(NAME, tokens, 0, 2 * PAGE_TOKENS)
    pair.offered(tokens, 2 * PAGE_TOKENS)
    pair.prefetched(tokens, len(tokens.ids), Extent.ALL)
    cached = pair.decode.admit(NAME, tokens, reserve=len(tokens.ids))
    assert cached == 2 * PAGE_TOKENS
    pair.decode.compute(NAME, tokens, cached, len(tokens.ids))
    assert pair.decode.wrong_pages(NAME, tokens, len(tokens.ids)) == 0


def test_a_group_that_has_ended_costs_its_readers_nothing_but_what_it_had(
    stack: ExitStack,
) -> None:
    pair = Pair(stack, "llama", (2, 2), store=None)
    tokens = keyed(5, 2 * PAGE_TOKENS + 5, PAGE_TOKENS)
    pair.prefill.close()
    pair.prefetched(tokens, len(tokens.ids), Extent.ALL)
    assert pair.decode.admit(NAME, tokens, reserve=len(tokens.ids)) == 0


@pytest.mark.parametrize(
    ("source", "store", "said"),
    [
        ("peer://there:1", "memory://no-peers", "set `peers` when the cache is opened"),
        ("peer://there:1?secret=hush", None, "the secret is that of `peers`"),
        ("peer://me:hush@there:1", None, "the secret is that of `peers`"),
    ],
)
def test_a_source_that_cannot_be_or_tells_a_secret_is_refused_by_name(
    stack: ExitStack, source: str, store: str | None, said: str
) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of("llama", store=store), 1)))

    def refused(cache: Cache) -> str:
        with pytest.raises(UsageError) as caught:
            cache.prefetch(NAME, [1] * PAGE_TOKENS, source=source)
        return str(caught.value)

    told = group.ask(refused)
    assert said in told
    assert "hush" not in told
    assert not group.ask(lambda cache: cache.inspection.in_flight)


def test_a_group_of_other_weights_finds_nothing_to_read(stack: ExitStack) -> None:
    pair = Pair(stack, "llama", (1, 1), store=None)
    tokens = keyed(6, 2 * PAGE_TOKENS + 5, PAGE_TOKENS)
    hand_over(pair, tokens, (PAGE_TOKENS,))
    other = replace(config_of("llama", store=None), weights_version="1")
    pair.decode = stack.enter_context(closing(ServedGroup(other, 1)))
    pair.prefetched(tokens, len(tokens.ids), Extent.ALL)
    assert pair.decode.admit(NAME, tokens, reserve=len(tokens.ids)) == 0


@pytest.mark.parametrize("store", [None, "memory://broken-seal"], ids=["directly", "by a store"])
@pytest.mark.parametrize("lends", [OWNED, LENT], ids=["caches", "lent pages"])
def test_a_tail_that_is_not_what_was_saved_is_handed_to_nobody(
    stack: ExitStack, store: str | None, lends: tuple[bool, bool]
) -> None:
    pair = Pair(stack, "llama", (2, 2), store=store, lends=lends)
    tokens = keyed(7, 2 * PAGE_TOKENS + 5, PAGE_TOKENS)
    ids = tokens.ids
    pair.prefill.admit(NAME, KeyedTokens(ids[:0], PAGE_TOKENS), reserve=len(ids))
    pair.prefill.compute(NAME, tokens, 0, len(ids))
    assert pair.prefill.ask(lambda cache: cache.retract(NAME, ids))
    pair.prefill.until(lambda cache: cache.load_state(NAME) is LoadState.SAVED)
    inspection = pair.prefill.caches[0].inspection
    executor, saved = inspection.executor, inspection.requests.known(NAME).saved
    assert isinstance(executor, RankExecutor)
    assert saved is not None
    pool = executor.host_pool
    pool.bytes_tensor.view(-1)[saved[0][0] * pool.layout.page_bytes] ^= 1
    for _ in range(20):
        pair.prefill.ask(lambda cache: pair.give(cache, ids))
        pair.prefill.until(lambda cache: cache.inspection.idle)
    pair.prefetched(tokens, len(ids), Extent.ALL)
    assert pair.decode.admit(NAME, tokens, reserve=len(ids)) < len(ids)
