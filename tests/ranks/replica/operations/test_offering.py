"""Offers: what a request that goes on elsewhere has others find."""

from lockstep.ranks.config import WritePolicy
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn


def test_what_an_offer_finds_no_room_for_is_counted_once_however_often_it_is_asked_for() -> None:
    ranks = RanksInTurn(2, host_pages=8, write_policy=WritePolicy.WRITE_BACK)
    first, second = list(range(8 * PAGE_TOKENS)), list(range(500, 500 + 4 * PAGE_TOKENS))
    ranks.every(lambda cache: cache.load_back("saved", [], reserve_tokens=len(first)))
    ranks.every(lambda cache: cache.retract("saved", first))
    ranks.settle()
    ranks.every(lambda cache: cache.load_back("offered", [], reserve_tokens=len(second)))
    ranks.every(lambda cache: cache.insert("offered", second, final=False))

    for _ in range(5):
        ranks.every(lambda cache: cache.offer("offered", second))
        ranks.step()

    assert ranks.every(lambda cache: cache.stats().operations["backup"]) == {"no_room": 1}
