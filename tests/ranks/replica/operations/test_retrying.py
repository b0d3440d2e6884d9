"""Failed backups and writes are retried, and counted until they succeed."""

from typing import Any

import pytest

from lockstep.ranks.protocol.config import Bounds
from lockstep.ranks.protocol.orders import KV_POOL, CopyToHost, Put
from lockstep.ranks.replica.tree.node import HOST
from tests.kit.ranks.in_turn import (
    PAGE_TOKENS,
    HostRanksInTurn,
    InTurn,
    RanksInTurn,
    prompt_of,
    window_of,
)

WINDOW_PAGES = 2


def with_a_window(
    *,
    span_pages: int = WINDOW_PAGES,
    window_pages: int = 64,
    host_pages: int = 64,
    store: bool = True,
) -> RanksInTurn:
    window = window_of(span_pages, device_pages=64, host_pages=window_pages)
    return RanksInTurn(host_pages=host_pages, store=store, components=(window,))


def fail_writes(ranks: RanksInTurn) -> None:
    for executor in ranks.executors:
        executor.complete_only(CopyToHost)
    ranks.step()
    for executor in ranks.executors:
        executor.fail()
    ranks.step()


def ordered_keys(ranks: InTurn[Any]) -> list[bytes]:
    return [
        key for put in ranks.executors[0].given(Put) for each in put.transfers for key in each.keys
    ]


def wait(ranks: RanksInTurn, seconds: int) -> None:
    ranks.pass_time(seconds)
    ranks.step()


def written(ranks: RanksInTurn, pool: str = "kv") -> list[int]:
    """Let all I/O succeed; return the positions of a pool's written pages, found by their keys."""
    cache = ranks.caches[0]
    keys: set[bytes] = set()
    for _ in range(100):
        for put in ranks.executors[0].given(Put):
            keys |= {key for each in put.transfers if each.pool == pool for key in each.keys}
        ranks.complete()
    tree = cache.inspection.prefixes.tree
    places = {
        key: node.start + at for node in tree.nodes() for at, key in enumerate(tree.keys(node))
    }
    return sorted(places[key] for key in keys)


def test_a_write_that_failed_is_tried_again_after_a_pause_though_nobody_asks() -> None:
    """Regression (Mooncake#3331, #2997): a key that a store rejected once was never written again."""
    ranks = RanksInTurn()
    ranks.publish("a", prompt_of(1, 3))
    fail_writes(ranks)
    ranks.settle()
    before = written(ranks)

    wait(ranks, 1)

    assert (before, written(ranks)) == ([], [0, 1, 2])


def test_while_the_store_fails_one_write_is_tried_after_each_pause() -> None:
    ranks = RanksInTurn()
    ranks.publish("a", prompt_of(1, 3))
    fail_writes(ranks)
    ranks.settle()

    ranks.compute("b", prompt_of(2, 3))
    wait(ranks, 1)
    tried = len(ranks.executors[0].given(Put))
    fail_writes(ranks)
    ranks.settle()
    wait(ranks, 1)

    assert (tried, len(ranks.executors[0].given(Put))) == (1, 0)
    assert ranks.every(lambda cache: cache.stats(rounds=0).unwritten_pages) == {"store_failed": 6}


def test_what_continues_a_prefix_that_could_not_be_written_is_written_after_it() -> None:
    ranks = RanksInTurn()
    ranks.publish("a", prompt_of(1, 3))
    fail_writes(ranks)
    ranks.settle()

    ranks.compute("b", prompt_of(1, 4), cached=3)
    wait(ranks, 1)

    assert written(ranks) == [0, 1, 2, 3]


def test_writes_beyond_what_may_wait_are_made_up_for_when_there_is_a_turn() -> None:
    ranks = RanksInTurn(bounds=Bounds(persists=1, persists_waiting=0))
    ranks.publish("a", prompt_of(1, 2))
    ranks.publish("b", prompt_of(2, 2))
    ranks.publish("c", prompt_of(3, 2))

    assert written(ranks) == [0, 0, 0, 1, 1, 1]


def test_all_that_is_put_off_is_tried_at_once_where_somebody_asks() -> None:
    ranks = RanksInTurn()
    for first in range(1, 6):
        ranks.publish(f"r{first}", prompt_of(first, 1))
    fail_writes(ranks)
    ranks.settle()

    ranks.every(lambda cache: cache.write_out())

    assert len(ranks.executors[0].given(Put)) == 5


def test_a_backup_that_found_no_room_begins_when_others_have_let_go() -> None:
    """Regression (sglang#39444): a refused backup was dropped; the host had room milliseconds later."""
    ranks = RanksInTurn(host_pages=4, device_pages=64)
    ranks.publish("a", prompt_of(1, 3))
    ranks.publish("b", prompt_of(2, 3))
    refused = ranks.every(lambda cache: cache.stats(rounds=0).unwritten_pages)

    assert refused == {"no_host_room": 2}
    assert written(ranks) == [0, 0, 1, 1, 2, 2]
    assert ranks.every(lambda cache: cache.stats(rounds=0).unwritten_pages) == {}


def test_a_prompt_longer_than_host_memory_is_written_whole() -> None:
    """Regression (sglang#28614): a prompt's end pinned its start, so the start was never evicted."""
    ranks = with_a_window(host_pages=4)
    ranks.publish("a", prompt_of(1, 11))

    assert written(ranks) == list(range(11))
    assert ranks.available(HOST)[0] == 4


def test_a_window_passes_through_less_room_than_it_needs_at_once() -> None:
    """A window larger than its host pool is written in parts, because its node is split."""
    ranks = with_a_window(span_pages=4, host_pages=6, window_pages=5)
    ranks.publish("a", prompt_of(1, 7))

    assert written(ranks, "window") == [2, 3, 4, 5, 6]
    assert ranks.every(lambda cache: cache.stats(rounds=0).unwritten_pages) == {}


def test_a_prompt_much_longer_than_host_memory_is_written_once_though_the_store_is_slow() -> None:
    """Regression: each retry wrote the stored pages again, so a slow store never got later pages."""
    ranks = RanksInTurn(host_pages=8, device_pages=64)
    ranks.publish("a", prompt_of(1, 60))
    keys: list[bytes] = []
    for _ in range(80):
        keys += ordered_keys(ranks)
        ranks.now_ms = [now + 5000 for now in ranks.now_ms]
        ranks.complete()

    assert (len(keys), len(set(keys))) == (60, 60)
    assert ranks.every(lambda cache: cache.stats(rounds=0).unwritten_pages) == {}


def test_a_lent_prompt_much_longer_than_host_memory_is_written_whole_by_a_slow_store() -> None:
    """Regression: the record of written pages was lost for a prompt larger than host memory."""
    ranks = HostRanksInTurn(host_pages=8)
    tokens, pages = prompt_of(1, 60), {KV_POOL: range(60)}
    ranks.every(lambda cache: cache.match_host("a", tokens))
    keys: list[bytes] = []
    for _ in range(80):
        ranks.every(lambda cache: cache.back_up("a", tokens, pages))
        ranks.every(lambda cache: cache.begin_backups())
        keys += ordered_keys(ranks)
        ranks.now_ms = [now + 5000 for now in ranks.now_ms]
        ranks.complete()

    assert not ranks.every(lambda cache: cache.waits_for_host_pages("a"))
    assert len(set(keys)) == 60


def test_a_copy_that_failed_is_tried_again_after_a_pause() -> None:
    ranks = RanksInTurn(store=False)
    ranks.publish("a", prompt_of(1, 3))
    for executor in ranks.executors:
        executor.fail()
    ranks.step()
    ranks.settle()

    wait(ranks, 1)
    ranks.settle()

    assert ranks.every(lambda cache: cache.match(prompt_of(1, 3))).last_host_tokens == 12


def test_pages_that_leave_memory_unwritten_are_counted() -> None:
    ranks = RanksInTurn(device_pages=4, host_pages=4)
    ranks.publish("a", prompt_of(1, 3))
    fail_writes(ranks)
    ranks.settle()

    ranks.compute("b", prompt_of(2, 4))

    lost = ranks.every(lambda cache: cache.stats(rounds=0).left_unwritten_pages)
    assert lost == {"store_failed": 3}


@pytest.mark.parametrize(("pages", "more"), [(6, 0), (6, 1)], ids=["whole pages", "a part more"])
def test_of_a_window_a_match_at_the_end_and_one_page_before_it_is_written(
    pages: int, more: int
) -> None:
    """Regression (vllm#57610): too few window pages were written to match one page before the end."""
    ranks = with_a_window()
    ranks.publish("a", prompt_of(1, pages) + [7] * more)

    assert written(ranks, "window") == list(range(pages - WINDOW_PAGES - 1, pages))


def test_of_a_window_a_match_where_two_prompts_part_is_written() -> None:
    ranks = with_a_window()
    system = prompt_of(1, 6)
    ranks.publish("a", system + prompt_of(2, 5))
    first = written(ranks, "window")

    other = system + prompt_of(3, 5)
    ranks.every(lambda cache: cache.load_back("b", other[:-1], reserve_tokens=len(other)))
    ranks.every(lambda cache: cache.insert("b", other))

    assert first == [8, 9, 10]
    assert set(range(3, 6)) <= set(written(ranks, "window"))


def test_of_a_window_matches_at_the_ends_of_earlier_turns_are_written_under_write_back() -> None:
    ranks = RanksInTurn(
        device_pages=16,
        write_policy="write_back",
        components=with_a_window().caches[0].config.components,
    )
    ranks.compute("a", prompt_of(1, 5))
    ranks.compute("b", prompt_of(1, 10), cached=5)
    written(ranks, "window")

    ranks.every(lambda cache: cache.load_back("c", [], reserve_tokens=16 * PAGE_TOKENS))

    assert {2, 3, 4, 7, 8, 9} <= set(written(ranks, "window"))


def test_ends_whose_windows_have_no_room_together_come_to_rest_without_a_store() -> None:
    """Regression: two prompts that end on one path evicted each other's window backups forever."""
    ranks = with_a_window(span_pages=3, window_pages=4, store=False)
    for number, (end, steps) in enumerate([(6, 2), (9, 0), (6, 2), (4, 0), (10, 1), (9, 2)]):
        ranks.publish(f"r{number}", prompt_of(1, end))
        for _ in range(steps):
            ranks.complete()

    ranks.settle()

    assert ranks.every(lambda cache: cache.stats(rounds=0).unwritten_pages) == {}


@pytest.mark.parametrize(
    ("span_pages", "window_pages", "ends"),
    [(3, 5, (7, 2)), (2, 5, (10, 5)), (2, 4, (6, 3))],
    ids=["beside a shorter one", "a page above", "of a node that has to be cut"],
)
def test_a_retry_for_one_end_of_a_path_leaves_no_other_end_unwritten(
    span_pages: int, window_pages: int, ends: tuple[int, int]
) -> None:
    """A retry for one prompt leaves host room to write the window pages that another prompt needs."""
    ranks = with_a_window(span_pages=span_pages, window_pages=window_pages)
    first, second = ends
    ranks.publish("a", prompt_of(1, first))
    fail_writes(ranks)
    ranks.publish("b", prompt_of(1, second))

    stored: set[int] = set()
    for _ in range(12):
        wait(ranks, 4)
        stored |= set(written(ranks, "window"))

    needed = {page for end in ends for page in range(max(0, end - span_pages - 1), end)}
    assert needed <= stored
