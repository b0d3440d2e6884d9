"""Host pages that other groups may read: which pages are pinned for them."""

from dataclasses import replace

import pytest

from lockstep.ranks.protocol.config import Recurrent, WritePolicy
from lockstep.ranks.protocol.network_config import Peers
from lockstep.ranks.protocol.orders import CopyToHost, Serve
from tests.kit.ranks.in_turn import LAYOUT, PAGE_TOKENS, RanksInTurn, window_of

STATE = replace(LAYOUT, page_tokens=1)
PROMPT = list(range(6 * PAGE_TOKENS))


def serving(window_host_pages: int = 10) -> RanksInTurn:
    """Return two ranks that have backed up a prompt with a window, and with a state at every page."""
    window = window_of(2, device_pages=40, host_pages=window_host_pages)
    state = Recurrent(checkpoint_tokens=PAGE_TOKENS, layout=STATE, device_pages=20, host_pages=20)
    ranks = RanksInTurn(2, store=False, components=(window, state), peers=Peers())
    compute(ranks, "served", PROMPT)
    return ranks


def compute(ranks: RanksInTurn, name: str, tokens: list[int]) -> None:
    ranks.every(lambda cache: cache.load_back(name, [], reserve_tokens=len(tokens)))
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        ranks.every(lambda cache: cache.insert(name, tokens[:end], final=end == len(tokens)))
        for executor in ranks.executors:
            executor.complete_only(CopyToHost)
        ranks.step()


def serve(ranks: RanksInTurn, pages: int) -> int:
    """Serve a prefix of the prompt for 60 s, with its window and state; return the pages served."""
    tokens = PROMPT[: pages * PAGE_TOKENS]
    served = ranks.every(lambda cache: cache.serve("served", tokens, ttl_s=60))
    return served // PAGE_TOKENS


def served_pages(ranks: RanksInTurn) -> dict[str, set[int]]:
    served: dict[str, set[int]] = {"kv": set(), "window": set(), "state": set()}
    for order in ranks.executors[0].given(Serve):
        for transfer in order.transfers:
            served[transfer.pool].update(transfer.pages)
    return served


def written_pages(ranks: RanksInTurn) -> dict[str, set[int]]:
    written: dict[str, set[int]] = {"kv": set(), "window": set(), "state": set()}
    for number in range(12):
        tokens = list(range(100 * (number + 1), 100 * (number + 1) + 5 * PAGE_TOKENS))
        name = f"other {number}"
        ranks.every(lambda cache: cache.load_back(name, [], reserve_tokens=len(tokens)))
        ranks.every(lambda cache: cache.insert(name, tokens))
        ranks.every(lambda cache: cache.release(name))
        for order in ranks.executors[0].given(CopyToHost):
            for transfer in order.transfers:
                written[transfer.pool].update(transfer.destinations)
        for executor in ranks.executors:
            executor.complete_only(CopyToHost)
        ranks.step()
    return written


@pytest.mark.parametrize("ends", [(6, 3), (3, 6), (2, 5, 3), (6, 4, 1)], ids=str)
def test_no_served_page_is_written_however_many_ends_are_served(ends: tuple[int, ...]) -> None:
    """Regression: if several prefixes of a prompt were served, only the longest pinned its window.

    Copies then overwrote the window pages of the other prefixes.
    """
    ranks = serving()
    answers = tuple(serve(ranks, end) for end in ends)
    served = served_pages(ranks)

    written = written_pages(ranks)

    assert answers == ends
    assert len(served["state"]) == len(ends)
    assert {pool: pages & written[pool] for pool, pages in served.items()} == {
        "kv": set(),
        "window": set(),
        "state": set(),
    }


def test_all_that_was_pinned_for_several_ends_can_leave_once_the_request_has() -> None:
    ranks = serving()
    before = ranks.available(1)
    for end in (6, 3, 4):
        serve(ranks, end)
    during = ranks.available(1)

    ranks.every(lambda cache: cache.release("served"))
    ranks.settle()

    assert during == [each - pinned for each, pinned in zip(before, (6, 5, 3), strict=True)]
    assert ranks.available(1) == before


def test_a_pool_of_windows_is_not_pinned_beyond_its_share_for_more_and_more_ends() -> None:
    ranks = serving(window_host_pages=7)

    answers = [serve(ranks, end) for end in (6, 4, 2)]

    assert answers == [6, 4, 1]
    assert ranks.available(1)[1] == 3


def test_what_serving_finds_no_room_for_is_counted_once_however_often_it_is_asked_for() -> None:
    ranks = RanksInTurn(2, host_pages=8, write_policy=WritePolicy.WRITE_BACK, peers=Peers())
    first, second = list(range(8 * PAGE_TOKENS)), list(range(500, 500 + 4 * PAGE_TOKENS))
    ranks.every(lambda cache: cache.load_back("saved", [], reserve_tokens=len(first)))
    ranks.every(lambda cache: cache.retract("saved", first))
    ranks.settle()
    ranks.every(lambda cache: cache.load_back("other", [], reserve_tokens=len(second)))
    ranks.every(lambda cache: cache.insert("other", second, final=False))

    for _ in range(5):
        ranks.every(lambda cache: cache.serve("other", second, ttl_s=60))
        ranks.step()

    assert ranks.every(lambda cache: cache.stats().operations["backup"]) == {"no_room": 1}


def test_of_tokens_that_nobody_has_computed_nothing_is_served_though_something_else_is() -> None:
    ranks = serving()
    assert serve(ranks, 4) == 4

    others = [token + 1000 for token in PROMPT[:PAGE_TOKENS]]

    pages = ranks.every(lambda cache: cache.serve("served", others, ttl_s=60))
    assert pages == 0
