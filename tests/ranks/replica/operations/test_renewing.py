"""Pages stored long ago are written again at their next use, because the store may have lost them."""

from lockstep.ranks.protocol.orders import CopyToHost, ObjectTransfer, Put
from lockstep.ranks.replica.operations.store import RENEWED_PART, RENEWED_S
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, RanksInTurn

HOST_PAGES = 64
PROMPT = list(range(4 * PAGE_TOKENS))
LONGER = [*PROMPT, *range(100, 100 + PAGE_TOKENS)]


def puts(ranks: RanksInTurn, name: str, tokens: list[int]) -> list[Put]:
    """Compute a prompt, let its I/O finish, and return the persist orders."""
    ranks.publish(name, tokens)
    return ended(ranks)


def ended(ranks: RanksInTurn) -> list[Put]:
    """Let all I/O succeed; return the persist orders."""
    ordered: list[Put] = []
    while not ranks.caches[0].inspection.idle:
        ordered += ranks.executors[0].given(Put)
        for executor in ranks.executors:
            executor.complete()
        ranks.step()
    return ordered


def pages_of(orders: list[Put]) -> int:
    return sum(len(each.keys) for order in orders for each in order.transfers)


def write_others(ranks: RanksInTurn, pages: int, first: int = 0) -> None:
    for number in range(first, first + pages):
        puts(ranks, f"other {number}", [1000 + number] * PAGE_TOKENS)


def test_what_was_just_written_is_not_written_again_and_what_follows_says_that_it_continues_it() -> (
    None
):
    ranks = RanksInTurn(host_pages=HOST_PAGES)
    (first,) = puts(ranks, "a", PROMPT)

    assert puts(ranks, "b", PROMPT) == []
    (second,) = puts(ranks, "c", LONGER)

    assert (first.after, pages_of([first])) == (b"", 4)
    assert (second.after, second.distance) == (first.transfers[0].keys[-1], 1)
    assert pages_of([second]) == 1


def test_once_a_part_of_host_memory_was_written_the_next_use_of_a_prompt_writes_all_of_it_again() -> (
    None
):
    ranks = RanksInTurn(host_pages=HOST_PAGES)
    (first,) = puts(ranks, "a", PROMPT)
    write_others(ranks, HOST_PAGES // RENEWED_PART)

    again = puts(ranks, "b", LONGER)
    then = puts(ranks, "c", LONGER)

    stored = [each for order in again for each in order.transfers if each.stored]
    assert stored == [ObjectTransfer("kv", first.transfers[0].keys, stored[0].pages, stored=True)]
    assert (pages_of(again), then) == (5, [])
    ranks.check()


def test_a_prompt_that_is_used_after_a_while_is_written_again_though_nothing_else_was() -> None:
    ranks = RanksInTurn(host_pages=HOST_PAGES)
    puts(ranks, "a", PROMPT)
    ranks.pass_time(RENEWED_S)

    assert pages_of(puts(ranks, "b", PROMPT)) == 4


def test_a_prompt_that_an_engine_lends_again_is_written_again_though_nothing_is_copied() -> None:
    ranks = HostRanksInTurn(host_pages=HOST_PAGES)
    ranks.every(lambda cache: cache.back_up("a", PROMPT, range(4)))
    ranks.every(lambda cache: cache.begin_backups())
    ranks.settle()
    ranks.every(lambda cache: cache.release("a"))
    ranks.pass_time(RENEWED_S)

    ranks.every(lambda cache: cache.back_up("b", PROMPT, range(4)))

    orders = [executor.given(Put) for executor in ranks.executors]
    assert [pages_of(each) for each in orders] == [4, 4]
    assert ranks.executors[0].given(CopyToHost) == []


def test_pages_count_as_seen_when_those_were_that_they_continue() -> None:
    ranks = RanksInTurn(host_pages=HOST_PAGES)
    puts(ranks, "a", PROMPT)
    write_others(ranks, HOST_PAGES // RENEWED_PART - 6)
    puts(ranks, "b", LONGER)
    write_others(ranks, 1, first=100)

    # The last page was written later, but its record counts as being as old as those of the pages
    # before it. Therefore all five pages are written again.
    assert pages_of(puts(ranks, "c", LONGER)) == 5


def test_what_a_write_did_not_find_in_the_store_and_could_not_write_is_tried_again() -> None:
    ranks = RanksInTurn(host_pages=HOST_PAGES)
    puts(ranks, "a", PROMPT)
    write_others(ranks, HOST_PAGES // RENEWED_PART)
    ranks.publish("b", PROMPT)
    for executor in ranks.executors:
        executor.fail()
    ranks.step()
    ranks.pass_time(RENEWED_S)

    assert pages_of(ended(ranks)) == 4
