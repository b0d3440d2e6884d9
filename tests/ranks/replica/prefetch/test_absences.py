"""Absence memory: a page that some rank's store lacks is not looked up again for a while."""

from lockstep.coordinator.ballot import Answered
from lockstep.ranks.protocol.config import Bounds, Timeouts
from lockstep.ranks.protocol.network_config import Peers
from lockstep.ranks.protocol.orders import LookUp
from lockstep.ranks.replica.operations.remembered import Remembered
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn

PROMPT = list(range(4 * PAGE_TOKENS))
LONG_S = 1000.0


def answer(ranks: RanksInTurn, pages: int) -> None:
    for executor in ranks.executors:
        [lookup] = executor.take(LookUp)
        executor.reports.append(Answered(lookup.operation, pages))
    ranks.step()


def miss(ranks: RanksInTurn) -> None:
    ranks.every(lambda cache: cache.prefetch("first", PROMPT))
    answer(ranks, 0)
    ranks.every(lambda cache: cache.release("first"))


def test_another_prompt_is_asked_for() -> None:
    ranks = RanksInTurn(timeouts=Timeouts(absence_memory_s=LONG_S))
    miss(ranks)

    assert ranks.every(lambda cache: cache.prefetch("second", [9, *PROMPT]))


def test_another_group_is_asked_for_what_the_store_has_not() -> None:
    ranks = RanksInTurn(timeouts=Timeouts(absence_memory_s=LONG_S), peers=Peers())
    miss(ranks)

    assert ranks.every(lambda c: c.prefetch("second", PROMPT, source="peer://127.0.0.1:7"))


def test_a_page_that_this_group_has_written_is_asked_for_again() -> None:
    ranks = RanksInTurn(timeouts=Timeouts(absence_memory_s=LONG_S))
    miss(ranks)
    ranks.every(lambda cache: cache.load_back("second", PROMPT[:-1], reserve_tokens=len(PROMPT)))
    ranks.every(lambda cache: cache.insert("second", PROMPT))
    ranks.every(lambda cache: cache.release("second"))
    ranks.settle()
    ranks.every(lambda cache: cache.drop())

    assert ranks.every(lambda cache: cache.prefetch("third", PROMPT))


def test_where_nothing_may_be_remembered_it_is_asked_for_again() -> None:
    bounds, timeouts = Bounds(remembered_misses=0), Timeouts(absence_memory_s=LONG_S)
    ranks = RanksInTurn(bounds=bounds, timeouts=timeouts)
    miss(ranks)

    assert ranks.every(lambda cache: cache.prefetch("second", PROMPT))


def test_the_oldest_is_forgotten_first() -> None:
    remembered: Remembered[str] = Remembered(1.0, 2)
    remembered.add("a", 0)
    remembered.add("b", 0)
    remembered.add("a", 10)
    remembered.add("c", 10)

    assert remembered.items() == (("a", 1010), ("c", 1010))


def test_what_is_remembered_ends_with_its_time() -> None:
    remembered: Remembered[str] = Remembered(1.0, 9)
    remembered.add("a", 0)
    remembered.add("b", 500)

    remembered.forget_old(1000)

    assert (remembered.has("a", 1000), remembered.has("b", 1000)) == (False, True)
    assert remembered.misses_all_of(["a"])
    assert not remembered.misses_all_of(["a", "b"])
