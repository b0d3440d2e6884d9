"""Host pages that a waiting request will use are evicted after pages that no request awaits."""

from lockstep.ranks.replica.tree.node import HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn

PAGES = 2
OLD, NEW, OTHER, LAST = (list(range(at, at + PAGES * PAGE_TOKENS)) for at in range(0, 400, 100))


def full_of_two_prompts(*, store: bool = True) -> HostRanksInTurn:
    """Return ranks whose host memory is full with two prompts, `OLD` and `NEW`."""
    ranks = HostRanksInTurn(host_pages=2 * PAGES, store=store)
    for tokens in (OLD, NEW):
        back_up(ranks, tokens)
    assert ranks.free(HOST) == 0
    return ranks


def back_up(ranks: HostRanksInTurn, tokens: list[int]) -> None:
    ranks.every(lambda cache: cache.back_up("computes", tokens, range(PAGES)))
    ranks.every(lambda cache: cache.release("computes"))
    ranks.settle()


def bring(ranks: HostRanksInTurn, request: str, tokens: list[int]) -> None:
    assert ranks.every(lambda cache: cache.prefetch(request, tokens))
    ranks.settle(lambda key: True)


def on_host(ranks: HostRanksInTurn, tokens: list[int]) -> int:
    return ranks.every(lambda cache: cache.match(tokens).host_tokens) // PAGE_TOKENS


def test_what_is_brought_for_another_request_drives_out_what_nobody_waits_for() -> None:
    ranks = full_of_two_prompts()
    assert not ranks.every(lambda cache: cache.prefetch("waits", OLD)), "all of it is there"

    bring(ranks, "comes later", OTHER)

    assert [on_host(ranks, each) for each in (OLD, NEW, OTHER)] == [PAGES, 0, PAGES]


def test_so_does_what_another_request_has_computed_where_there_is_no_store() -> None:
    ranks = full_of_two_prompts(store=False)
    ranks.every(lambda cache: cache.prefetch("waits", OLD))

    back_up(ranks, OTHER)

    assert [on_host(ranks, each) for each in (OLD, NEW, OTHER)] == [PAGES, 0, PAGES]


def test_of_a_prompt_no_more_stays_than_what_the_request_asks_for() -> None:
    ranks = full_of_two_prompts()
    ranks.every(lambda cache: cache.prefetch("waits", OLD[:PAGE_TOKENS]))

    bring(ranks, "comes later", OTHER)

    assert [on_host(ranks, each) for each in (OLD, NEW, OTHER)] == [1, 1, PAGES]


def test_nothing_is_held_for_a_request_that_waits_while_many_others_come() -> None:
    ranks = full_of_two_prompts()
    ranks.every(lambda cache: cache.prefetch("waits", OLD))

    for name, tokens in (("comes later", OTHER), ("comes last", LAST)):
        bring(ranks, name, tokens)

    assert [on_host(ranks, each) for each in (OLD, OTHER, LAST)] == [0, PAGES, PAGES]
