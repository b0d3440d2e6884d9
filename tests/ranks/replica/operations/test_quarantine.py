"""R10: if hanging copies keep too many pages, the store is detached or the epoch ends."""

from contextlib import suppress

import pytest

from lockstep.coordinator.ballot import Quiesced, QuiesceExpired, TransferEnded
from lockstep.errors import RankUnhealthy
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.ranks.protocol.answers import Wait
from lockstep.ranks.protocol.orders import Cancel, CopyToDevice, CopyToHost, Put
from lockstep.ranks.replica.attaching import StoreState
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.tree.node import DEVICE, HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, RanksInTurn

PAGES = 4


def prompt(number: int) -> list[int]:
    return list(range(100 * number, 100 * number + PAGES * PAGE_TOKENS))


def compute_and_hang(ranks: RanksInTurn, number: int) -> int:
    """Make a backup hang on rank 1, and return its id; the caller's next step quarantines it."""
    ranks.publish(f"r{number}", prompt(number))
    backup = ranks.take_operation(CopyToHost)
    for rank, executor in enumerate(ranks.executors):
        executor.reports.append(TransferEnded(backup, ok=rank == 0))
    ranks.step()
    for executor in ranks.executors:
        executor.take(Cancel)
    ranks.executors[0].reports.append(Quiesced(backup))
    ranks.executors[1].reports.append(QuiesceExpired(backup))
    return backup


def hang_everywhere(ranks: RanksInTurn | HostRanksInTurn, copy: int) -> None:
    """Let a copy fail and exceed its quiesce deadline on all ranks; the next step quarantines it."""
    ranks.report(TransferEnded(copy, ok=False))
    ranks.step()
    ranks.report(QuiesceExpired(copy))


def ended_by(ranks: RanksInTurn) -> list[str]:
    words: list[str] = []
    for cache in ranks.caches:
        cache.open_round()
    for cache in ranks.caches:
        with pytest.raises(RankUnhealthy) as raised:
            cache.close_round()
        words.append(str(raised.value))
    return words


def test_copies_that_keep_more_than_half_of_a_pool_end_the_epoch_in_the_same_words() -> None:
    ranks = RanksInTurn(device_pages=64, host_pages=24, store=False)
    for number in range(3):
        compute_and_hang(ranks, number)
        ranks.step()

    last = compute_and_hang(ranks, 3)

    words = ended_by(ranks)
    assert words[0] == (
        "4 hung operations keep 16 of 24 host pages, and 12 may be kept"
        f" (bounds.quarantine_pages); the last is backup {last}, which hangs on rank 1"
    )
    assert words == words[:1] * 2


def test_a_device_that_is_smaller_than_host_memory_is_guarded_as_well() -> None:
    ranks = RanksInTurn(device_pages=12, host_pages=64, store=False)
    compute_and_hang(ranks, 0)
    ranks.step()

    compute_and_hang(ranks, 1)

    assert "keep 8 of 12 device pages, and 6 may be kept" in ended_by(ranks)[0]


def test_copies_within_the_bound_cost_their_pages_until_they_fall_quiet() -> None:
    ranks = RanksInTurn(device_pages=16, host_pages=16, store=False)
    first, second = compute_and_hang(ranks, 0), 0
    ranks.step()
    second = compute_and_hang(ranks, 1)
    ranks.step()
    assert ranks.phase(first) == ranks.phase(second) == "QUARANTINED"
    assert [ranks.available(DEVICE), ranks.available(HOST)] == [[8], [8]]
    full = ranks.every(lambda cache: cache.load_back("more", [], reserve_tokens=9 * PAGE_TOKENS))
    assert full is Wait.NO_ROOM

    ranks.report(Quiesced(first), Quiesced(second))
    ranks.step()
    ranks.step()

    assert ranks.phase(first) == ranks.phase(second) == "DONE"
    answer = ranks.every(lambda cache: cache.load_back("more", [], reserve_tokens=16 * PAGE_TOKENS))
    assert not isinstance(answer, Wait)


def test_a_prefix_that_several_hung_copies_lock_is_counted_once() -> None:
    ranks = RanksInTurn(device_pages=20, host_pages=64, store=False)
    shared = prompt(0)
    compute_and_hang(ranks, 0)
    ranks.step()

    for number in (1, 2):
        ranks.publish(f"s{number}", shared + [1000 * number] * PAGE_TOKENS)
        backup = ranks.take_operation(CopyToHost)
        hang_everywhere(ranks, backup)
        ranks.step()

    assert ranks.every(lambda cache: cache.inspection.lost) is None


def test_a_load_back_that_hangs_counts_what_it_keeps_and_not_the_prefix_that_it_pins() -> None:
    """Of a hanging load back, only the page that it fills counts as kept, not the pinned prefix."""
    ranks = RanksInTurn(device_pages=20, host_pages=64, store=False)
    long = list(range(12 * PAGE_TOKENS))
    ranks.compute("a", long)
    ranks.compute("b", [*long, *[9] * PAGE_TOKENS])
    ranks.every(lambda cache: cache.load_back("fill", [], reserve_tokens=8 * PAGE_TOKENS))
    ranks.every(lambda cache: cache.release("fill"))
    ranks.every(lambda cache: cache.pin("kept", [*long, *[9] * PAGE_TOKENS], ttl_s=1000.0))

    ranks.every(lambda cache: cache.load_back("x", [*long, *[9] * PAGE_TOKENS]))
    load = ranks.take_operation(CopyToDevice)
    hang_everywhere(ranks, load)
    ranks.step()

    assert ranks.phase(load) == "QUARANTINED"
    assert ranks.every(lambda cache: cache.inspection.lost) is None


def test_backups_that_hang_keep_no_more_than_half_of_an_engine_s_pages() -> None:
    """If hanging backups keep more than half of the engine's pages, the epoch ends."""
    ranks = HostRanksInTurn(host_pages=400, store=False, engine_pages=10)
    words = [hang_lent(ranks, number) for number in range(2)]

    assert words[0] is None
    assert "keep 8 of 10 lent device pages, and 5 may be kept" in (words[1] or "")


def test_a_retract_that_hangs_lets_its_request_go_on_and_keeps_its_pages_lent() -> None:
    """If a retract hangs, the request's load state is FAILED, and its pages remain lent."""
    ranks = HostRanksInTurn(host_pages=400, store=False, engine_pages=100)
    ranks.every(lambda cache: cache.match_host("r", prompt(0), device_tokens=0))
    assert ranks.every(lambda cache: cache.retract("r", prompt(0), range(PAGES)))
    ranks.every(lambda cache: cache.begin_backups())
    hang(ranks)

    assert ranks.every(lambda cache: cache.load_state("r")) is LoadState.FAILED
    assert ranks.every(lambda cache: cache.has_copies_in_flight("r"))
    assert not ranks.every(lambda cache: cache.release("r"))
    assert not ranks.every(lambda cache: cache.pending_frees)
    assert not ranks.every(lambda cache: cache.finish_copies())


def test_a_request_is_saved_though_an_earlier_copy_of_its_pages_hangs() -> None:
    ranks = HostRanksInTurn(1, host_pages=400, store=False, engine_pages=100)
    (cache,) = ranks.caches
    cache.back_up("r", prompt(0), range(PAGES))
    cache.begin_backups()
    hang(ranks)
    cache.wait_for_copies("r")
    ranks.executors[0].orders.clear()

    assert cache.retract("r", [*prompt(0), 7], range(PAGES + 1))
    ranks.settle()

    assert cache.load_state("r") is LoadState.SAVED
    assert cache.has_copies_in_flight("r")


def test_what_a_request_lends_to_two_copies_that_hang_counts_once() -> None:
    ranks = HostRanksInTurn(host_pages=400, store=False, engine_pages=10)
    words = [hang_lent(ranks, number, "r") for number in range(2)]

    assert words == [None, None]


def test_a_store_that_hangs_is_detached_before_what_its_writes_pin_is_the_host() -> None:
    """A hanging store is detached before its writes fill host memory with pinned prefixes."""
    ranks = RanksInTurn(device_pages=200, host_pages=100)
    for number in range(3):
        shared = list(range(1000 * number, 1000 * number + 12 * PAGE_TOKENS))
        ranks.compute(f"a{number}", shared)
    for number in range(3):
        shared = list(range(1000 * number, 1000 * number + 12 * PAGE_TOKENS))
        ranks.publish(f"b{number}", [*shared, *[9] * PAGE_TOKENS])
    hang_writes(ranks)

    assert ranks.every(lambda cache: cache.store_state()) is not StoreState.ATTACHED


def hang_writes(ranks: RanksInTurn) -> None:
    for executor in ranks.executors:
        executor.complete_only(CopyToHost)
    ranks.step()
    for executor in ranks.executors:
        for write in executor.take(Put):
            executor.reports.append(TransferEnded(write.operation, ok=False))
    for _ in range(3):
        ranks.step()
    for executor in ranks.executors:
        for cancel in executor.take(Cancel):
            executor.reports.append(QuiesceExpired(cancel.operation))
    for _ in range(3):
        ranks.step()


def hang_lent(ranks: HostRanksInTurn, number: int, name: str = "") -> str | None:
    """Let a backup of lent pages hang; return the reason if that ended the group, else None."""
    for cache in ranks.caches:
        cache.back_up(name or f"r{number}", prompt(number), range(PAGES))
        cache.begin_backups()
    return hang(ranks)


def hang(ranks: HostRanksInTurn) -> str | None:
    """Let the pending copy to the host hang; return the reason if that ended the group, else None."""
    backup = ranks.take_operation(CopyToHost)
    hang_everywhere(ranks, backup)
    for half in (RankCache.open_round, RankCache.close_round):
        for cache in ranks.caches:
            with suppress(RankUnhealthy):
                half(cache)
    return ranks.every(lambda cache: cache.inspection.lost)
