"""Requests: admission, load back, insertion, and the pages that they free."""

from array import array

import numpy as np
import pytest

from lockstep.coordinator.ballot import Quiesced, TransferEnded
from lockstep.errors import RankUnhealthy, UsageError
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.answers import Admission, Wait
from lockstep.ranks.protocol.config import Bounds
from lockstep.ranks.protocol.orders import CopyToDevice, CopyToHost, Put
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.tree.matching import Match
from lockstep.ranks.replica.tree.node import DEVICE, HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn, prompt, window_of


def admitted(answer: Admission | Wait) -> Admission:
    assert isinstance(answer, Admission), answer
    return answer


def test_a_match_counts_whole_pages_and_changes_nothing() -> None:
    ranks = RanksInTurn(2)
    tokens = prompt(4)
    ranks.compute("a", tokens)
    before = ranks.every(lambda cache: cache.inspection.state_digest)

    assert ranks.every(lambda cache: cache.match(tokens[:-1])) == Match(
        device_tokens=12, host_tokens=12, last_host_tokens=12
    )
    assert ranks.every(lambda cache: cache.match([*tokens[:6], 999, 998])).device_tokens == 4
    assert ranks.every(lambda cache: cache.match(tokens, "other tenant")).host_tokens == 0
    assert ranks.every(lambda cache: cache.inspection.state_digest) == before


def test_an_admission_that_finds_no_room_changes_nothing_but_splits() -> None:
    ranks = RanksInTurn(2, device_pages=8)
    ranks.compute("a", prompt(4))
    ranks.every(lambda cache: cache.load_back("b", prompt(6, start=100), reserve_tokens=24))
    ranks.every(lambda cache: cache.page_table("b").tolist())

    answer = ranks.every(lambda cache: cache.load_back("c", prompt(4), reserve_tokens=32))

    assert answer is Wait.NO_ROOM
    assert ranks.every(lambda cache: cache.match(prompt(4))).host_tokens == 16
    ranks.check()


@pytest.mark.parametrize(
    ("tokens", "reserve_tokens", "pages"),
    [(prompt(4), 33, 9), ([], 400, 100)],
    ids=["one page", "many"],
)
def test_a_request_that_can_never_fit_is_refused_by_name_and_changes_nothing(
    tokens: list[int], reserve_tokens: int, pages: int
) -> None:
    ranks = RanksInTurn(2, device_pages=8)
    before = ranks.every(lambda cache: (cache.inspection.digest, cache.inspection.state_digest))

    for cache in ranks.caches:
        with pytest.raises(
            UsageError, match=rf"^request 'a' needs {pages} device pages .* 8 in all"
        ):
            cache.load_back("a", tokens, reserve_tokens=reserve_tokens)

    after = ranks.every(lambda cache: (cache.inspection.digest, cache.inspection.state_digest))
    assert after == before


def test_a_backup_locks_no_deeper_than_what_it_copies() -> None:
    """A pin's backup of window pages locks no node below the copied pages."""
    window = window_of(2, device_pages=10, host_pages=4)
    ranks = RanksInTurn(2, device_pages=8, host_pages=20, store=False, components=(window,))
    for tokens in ([1] * 8, [1] * 8 + [2] * 4, [50] * 4, [51] * 4, [52] * 4):
        ranks.compute(f"r{len(tokens)}{tokens[-1]}", tokens)
    room = ranks.free(DEVICE) + 1
    ranks.every(lambda cache: cache.load_back("f", [], reserve_tokens=room * PAGE_TOKENS))
    ranks.every(lambda cache: cache.release("f"))

    ranks.every(lambda cache: cache.pin("p", [1] * 8 + [2] * 4, ttl_s=10.0))
    ranks.check()
    ranks.every(lambda cache: cache.unpin("p"))

    ranks.check()


def test_a_request_whose_load_back_fails_after_a_reset_is_offered_nothing_from_before() -> None:
    ranks = RanksInTurn(2, device_pages=8, store=False)
    ranks.compute("a", prompt(2))
    evict_from_device(ranks, 7)
    ranks.every(lambda cache: cache.load_back("x", prompt(2), reserve_tokens=8))
    ranks.every(lambda cache: cache._replica.reset())  # pyright: ignore[reportPrivateUsage]

    for executor in ranks.executors:
        executor.reports += [
            TransferEnded(each.operation, ok=False) for each in executor.take(CopyToDevice)
        ]
    ranks.step()
    ranks.settle()

    assert ranks.every(lambda cache: cache.load_state("x")) is LoadState.FAILED
    again = admitted(ranks.every(lambda c: c.load_back("x", prompt(2), reserve_tokens=8)))
    assert again.cached_tokens == 0


def test_a_prompt_that_is_longer_than_a_window_s_pool_is_refused_and_not_told_to_wait() -> None:
    """A prompt longer than a window's device pool is refused, because it could wait forever."""
    window = window_of(4, device_pages=10, host_pages=50)
    ranks = RanksInTurn(2, device_pages=100, store=False, components=(window,))

    for cache in ranks.caches:
        with pytest.raises(UsageError, match=r"needs 20 device window pages .* 10 in all"):
            cache.load_back("a", prompt(20)[:-1], reserve_tokens=80)
    in_parts = ranks.every(lambda cache: cache.load_back("b", prompt(20)[:-1], reserve_tokens=40))

    admitted(in_parts)


def test_pages_of_a_running_request_are_never_evicted() -> None:
    ranks = RanksInTurn(2, device_pages=8)
    ranks.compute("a", prompt(4))
    held = admitted(ranks.every(lambda cache: cache.load_back("b", prompt(4), reserve_tokens=16)))
    assert held.device_tokens == 16
    table = ranks.every(lambda cache: cache.page_table("b").tolist())

    ranks.compute("c", prompt(4, start=100))
    too_much = ranks.every(
        lambda cache: cache.load_back("d", prompt(5, start=200), reserve_tokens=20)
    )

    assert too_much is Wait.NO_ROOM
    assert ranks.every(lambda cache: cache.page_table("b").tolist()) == table
    assert ranks.every(lambda cache: cache.match(prompt(4))).device_tokens == 16


def test_two_requests_that_compute_the_same_pages_share_one_copy() -> None:
    ranks = RanksInTurn(2)
    tokens = prompt(3)
    for name in ("a", "b"):
        ranks.every(lambda cache: cache.load_back(name, tokens[:-1], reserve_tokens=12))
    before = ranks.free(DEVICE)

    ranks.every(lambda cache: cache.insert("a", tokens))
    ranks.every(lambda cache: cache.insert("b", tokens))

    assert ranks.free(DEVICE) == before + 3
    tables = [ranks.every(lambda c: c.page_table(name).tolist()) for name in "ab"]
    assert tables[0] == tables[1]
    ranks.settle()
    for name in ("a", "b"):
        ranks.every(lambda cache: cache.release(name))
    ranks.check()


def test_chunks_of_a_prompt_are_published_as_they_are_computed() -> None:
    ranks = RanksInTurn(2)
    tokens = prompt(5)[:-1]
    ranks.every(lambda cache: cache.load_back("a", tokens[:-1], reserve_tokens=len(tokens) + 4))

    assert ranks.every(lambda cache: cache.insert("a", tokens[:10], final=False)) == 8
    assert ranks.every(lambda cache: cache.match(tokens)).device_tokens == 8
    assert ranks.every(lambda cache: cache.insert("a", tokens)) == 16
    ranks.settle()

    ranks.every(lambda cache: cache.release("a"))
    assert ranks.every(lambda cache: cache.match(tokens)) == Match(
        device_tokens=16, host_tokens=16, last_host_tokens=16
    )
    assert ranks.free(DEVICE) == 64 - 4
    ranks.check()


def test_a_request_grows_page_by_page_until_there_is_no_room() -> None:
    ranks = RanksInTurn(2, device_pages=4)
    ranks.every(lambda cache: cache.load_back("a", prompt(1), reserve_tokens=5))

    assert ranks.every(lambda cache: cache.extend("a", 8))
    assert ranks.every(lambda cache: len(cache.page_table("a"))) == 2
    assert ranks.every(lambda cache: cache.extend("a", 16))
    assert not ranks.every(lambda cache: cache.extend("a", 17))
    ranks.every(lambda cache: cache.release("a"))
    assert ranks.free(DEVICE) == 4


def evict_from_device(ranks: RanksInTurn, pages: int) -> None:
    """Evict all other pages from the device, by computing a prompt of `pages` pages."""
    ranks.compute("filler", prompt(pages, start=5000))


def test_a_request_released_while_it_loads_leaves_the_load_to_settle_by_itself() -> None:
    ranks = RanksInTurn(2, device_pages=8)
    ranks.compute("a", prompt(4))
    evict_from_device(ranks, 8)
    ranks.every(lambda cache: cache.load_back("b", prompt(4), reserve_tokens=16))

    ranks.every(lambda cache: cache.abort("b"))
    ranks.check()
    ranks.settle()

    assert ranks.every(lambda cache: cache.match(prompt(4))).device_tokens == 16


def test_children_are_backed_up_only_after_their_parents() -> None:
    ranks = RanksInTurn(2, host_pages=3, store=False)
    tokens = prompt(4)
    ranks.every(lambda cache: cache.load_back("a", [], reserve_tokens=16))
    for end in (8, 12, 16):
        ranks.every(lambda cache: cache.insert("a", tokens[:end], final=end == 16))
    ranks.settle()

    assert ranks.every(lambda cache: cache.match(tokens)).device_tokens == 16
    ranks.every(lambda cache: cache.release("a"))
    ranks.every(lambda cache: cache.load_back("b", [], reserve_tokens=64 * PAGE_TOKENS))
    assert ranks.every(lambda cache: cache.match(tokens)) == Match(
        device_tokens=0, host_tokens=12, last_host_tokens=12
    )


def test_persists_beyond_their_bound_wait_their_turn_and_then_are_dropped_by_count() -> None:
    """Rule R10: operations over a bound wait in replicated order; a full waiting queue drops them."""
    ranks = RanksInTurn(2, bounds=Bounds(persists=1, persists_waiting=1))
    for index in range(3):
        name = f"r{index}"
        ranks.every(lambda cache: cache.load_back(name, [], reserve_tokens=4))
        ranks.every(lambda cache: cache.insert(name, prompt(1, start=index * 100)))
    for executor in ranks.executors:
        executor.reports += [
            TransferEnded(order.operation, ok=True) for order in executor.take(CopyToHost)
        ]
    ranks.step()

    assert [len(executor.take(Put)) for executor in ranks.executors] == [1, 1]
    assert ranks.every(lambda cache: cache.stats().operations["persist"]) == {"no_room": 1}


def test_calls_out_of_order_are_refused_and_change_nothing() -> None:
    ranks = RanksInTurn(2)
    before = ranks.every(lambda cache: cache.inspection.state_digest)

    def refused(cache: Cache) -> None:
        for call in (
            lambda: cache.page_table("unknown"),
            lambda: cache.insert("unknown", prompt(1)),
            lambda: cache.release("unknown"),
            lambda: cache.match(b"123"),
        ):
            with pytest.raises(UsageError):
                call()

    ranks.every(refused)
    ranks.every(lambda cache: cache.abort("unknown"))
    assert ranks.every(lambda cache: cache.inspection.state_digest) == before
    ranks.every(lambda cache: cache.load_back("a", prompt(2), reserve_tokens=8))
    with pytest.raises(UsageError, match="has filled 3 pages and reserved 2"):
        ranks.caches[0].insert("a", prompt(3))
    with pytest.raises(UsageError, match="admitted already"):
        ranks.caches[0].load_back("a", prompt(2))


def test_a_failed_load_keeps_its_sources_until_no_copy_reads_them() -> None:
    """Rule R3: a failed load keeps its host pages pinned until no rank's copy reads them."""
    ranks = RanksInTurn(2, device_pages=8, host_pages=12)
    ranks.compute("a", prompt(4))
    ranks.compute("longer", prompt(6))
    evict_from_device(ranks, 6)
    ranks.every(lambda cache: cache.load_back("b", prompt(4), reserve_tokens=16))
    operation = ranks.executors[0].take(CopyToDevice)[0].operation
    ranks.executors[1].reports.append(TransferEnded(operation, ok=False))
    ranks.step()
    assert ranks.phase(operation) == "QUIESCE"
    ranks.every(lambda cache: cache.abort("b"))

    ranks.every(lambda cache: cache.load_back("c", [], reserve_tokens=4))
    ranks.every(lambda cache: cache.insert("c", prompt(1, start=9000)))
    ranks.check()

    pinned = ranks.every(
        lambda cache: cache.inspection.prefixes.allocator.ref_counts.kept_pages[HOST][0]
    )
    assert pinned >= 4
    ranks.report(Quiesced(operation))
    ranks.settle()
    assert (
        ranks.every(
            lambda cache: cache.inspection.prefixes.allocator.ref_counts.kept_pages[HOST][0]
        )
        == 0
    )


def test_token_ids_that_int32_cannot_hold_never_match_another_prompt() -> None:
    """Rule R9: token ids that int32 cannot hold never match: a cast would wrap them to other ids."""
    ranks = RanksInTurn(1)
    ranks.compute("victim", prompt(2))
    cache = ranks.caches[0]
    for tokens in (
        np.array(prompt(2), dtype=np.int64) + 2**32,
        np.full(8, 2**32 - 1, dtype=np.uint32),
        memoryview(array("q", prompt(2))),
        [2**31] * 8,
    ):
        with pytest.raises(UsageError, match="int32"):
            cache.match(tokens)
    assert cache.match(np.array(prompt(2), dtype=np.int64)).device_tokens == 8
    assert cache.match(memoryview(array("i", prompt(2)))).device_tokens == 8


def test_an_insert_of_other_tokens_than_those_admitted_is_refused_and_changes_nothing() -> None:
    ranks = RanksInTurn(1)
    ranks.compute("a", prompt(3))
    cache = ranks.caches[0]
    cache.load_back("b", prompt(2), reserve_tokens=12)
    before = cache.inspection.state_digest

    with pytest.raises(UsageError, match="other tokens"):
        cache.insert("b", [7] * 12)

    assert cache.inspection.state_digest == before
    ranks.check()


def test_a_page_table_is_given_only_when_its_pages_are_there() -> None:
    ranks = RanksInTurn(2, device_pages=8)
    ranks.compute("a", prompt(4))
    evict_from_device(ranks, 8)
    ranks.every(lambda cache: cache.load_back("b", prompt(4), reserve_tokens=20))

    for cache in ranks.caches:
        with pytest.raises(UsageError, match="not ready"):
            cache.page_table("b")
    ranks.settle()
    assert ranks.every(lambda cache: len(cache.page_table("b"))) == 5


def test_a_prompt_wider_than_the_host_is_backed_up_as_far_as_there_is_room() -> None:
    ranks = RanksInTurn(2, host_pages=8, store=False)
    ranks.compute("a", prompt(10))

    assert ranks.free(HOST) == 0
    assert ranks.every(lambda cache: cache.inspection.prefixes.allocator.tree_pages[HOST][0]) == 8
    assert ranks.every(lambda cache: cache.stats().operations["backup"]) == {
        "complete": 1,
        "no_room": 1,
    }


def test_after_the_end_of_an_epoch_no_command_concludes_anything() -> None:
    ranks = RanksInTurn(2)
    ranks.compute("a", prompt(2))
    ranks.every(lambda cache: cache.load_back("b", prompt(2), reserve_tokens=8))
    ranks.executors[1].ill = "its disk is gone"
    for cache in ranks.caches:
        cache.open_round()
    for cache in ranks.caches:
        with pytest.raises(RankUnhealthy):
            cache.close_round()

    cache = ranks.caches[0]
    for call in (
        lambda: cache.prefetch("c", prompt(3)),
        lambda: cache.load_back("c", prompt(3)),
        lambda: cache.insert("b", prompt(2)),
        lambda: cache.extend("b", 12),
        cache.step,
    ):
        with pytest.raises(RankUnhealthy):
            call()
    cache.release("b")
    cache.close()


def test_arguments_that_are_no_tokens_or_names_change_nothing() -> None:
    ranks = RanksInTurn(1)
    cache = ranks.caches[0]
    before = cache.inspection.state_digest
    for call in (
        lambda: cache.prefetch("x", prompt(1), "\ud800"),
        lambda: cache.load_back("x", prompt(1), "\ud800"),
        lambda: cache.load_back("x", prompt(1), "\0tenant"),
        lambda: cache.load_back("x", prompt(1), reserve_tokens="12"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError):
            call()
    assert cache.inspection.state_digest == before
