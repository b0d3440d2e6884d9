"""Invalid calls of an engine that lends pages, and requests that lose pages while in flight."""

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.coordinator.ballot import Answered, Landed, Quiesced, TransferEnded
from lockstep.errors import UsageError
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.answers import Wait
from lockstep.ranks.protocol.orders import CopyToHost, Fetch, LookUp
from lockstep.ranks.replica.operations.requests import LentRequest, LoadState
from lockstep.ranks.replica.tree.node import HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn

PAGES = 6
TOKENS = list(range(PAGES * PAGE_TOKENS))


def test_pages_that_land_for_a_request_that_has_begun_anew_leak_nothing() -> None:
    """No host page leaks if a prefetch lands under a tree node that a reset has dropped."""
    ranks = HostRanksInTurn()
    more = [*TOKENS, *range(900, 900 + PAGE_TOKENS)]
    free = ranks.free(HOST)
    ranks.every(lambda c: c.prefetch("q", more))
    for executor in ranks.executors:
        executor.reports.append(Answered(executor.take(LookUp)[0].operation, PAGES + 1))
    ranks.step()
    ranks.every(lambda c: c.back_up("p", TOKENS, range(PAGES)))
    ranks.every(lambda c: c.retract("q", TOKENS, range(10, 10 + PAGES)))
    backup, retract = (each.operation for each in ranks.executors[0].given(CopyToHost))
    ranks.executors[0].reports.append(TransferEnded(backup, ok=False))
    ranks.executors[1].reports.append(TransferEnded(backup, ok=True))
    ranks.step()
    ranks.report(TransferEnded(retract, ok=True), Quiesced(backup))
    ranks.step()
    ranks.step()
    assert ranks.every(lambda c: c.load_state("q")) is LoadState.SAVED
    ranks.every(lambda c: c.release("p"))
    ranks.every(lambda c: c.reset())

    assert ranks.every(lambda c: c.resume("q", range(PAGES))) is Wait.LOST
    for executor in ranks.executors:
        (fetch,) = executor.given(Fetch)
        late = Landed(fetch.operation, len(fetch.transfers[0].keys))
        executor.reports += [late, Quiesced(fetch.operation)]
        executor.orders.clear()
    ranks.step()
    ranks.step()
    ranks.every(lambda c: c.release("q"))
    ranks.every(lambda c: c.reset())
    ranks.settle()

    assert ranks.free(HOST) == free
    assert not ranks.caches[0].inspection.prefixes.tree.roots


def test_a_fence_that_is_refused_leaves_the_prefetch_alone() -> None:
    ranks = HostRanksInTurn(1)
    (cache,) = ranks.caches
    cache.prefetch("r", [*TOKENS, *range(900, 900 + PAGE_TOKENS)])
    cache.back_up("r", TOKENS, range(PAGES))
    cache.reset()
    cache.retract("r", TOKENS, range(PAGES))
    before = cache.inspection.digest

    with pytest.raises(UsageError, match="has a copy in flight"):
        cache.fence("r")

    assert cache.inspection.digest == before


REFUSED: dict[str, Callable[[HostCache], object]] = {
    "a page that is none": lambda c: c.back_up("r", TOKENS, [-7] * PAGES),
    "pages in two dimensions": lambda c: c.back_up("r", TOKENS, np.zeros((2, 3), np.int32)),
    "bytes for pages": lambda c: c.back_up("r", TOKENS, b"abc"),
    "a start before the first token": lambda c: c.match_host("r", TOKENS, device_tokens=-4),
    "a name that is a list": lambda c: c.match_host([], TOKENS),  # type: ignore[arg-type]
    "a list to prefetch for": lambda c: c.prefetch([], TOKENS),  # type: ignore[arg-type]
    "a list to release": lambda c: c.release([]),  # type: ignore[arg-type]
    "a list to ask of": lambda c: c.load_state([]),  # type: ignore[arg-type]
    "a store that is no text": lambda c: c.attach_store(5),  # type: ignore[arg-type]
    "a namespace that is no text": lambda c: c.match(TOKENS, 5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused_by_name_and_changes_nothing(
    wrong: Callable[[HostCache], object],
) -> None:
    (cache,) = HostRanksInTurn(1).caches
    before = cache.inspection.digest

    with pytest.raises(UsageError):
        wrong(cache)

    assert cache.inspection.digest == before


def test_a_request_without_a_hit_counts_among_what_was_asked_for() -> None:
    (cache,) = HostRanksInTurn(1, store=False).caches
    cache.match_host("r", TOKENS)
    cache.admit("r", TOKENS)
    for pages in (2, PAGES):
        cache.back_up("r", TOKENS[: pages * PAGE_TOKENS], range(pages))

    stats = cache.stats().replica

    assert stats.asked_tokens == len(TOKENS)
    assert stats.hit_tokens == {"device": 0, "host": 0, "storage": 0}


def test_copies_that_have_ended_are_remembered_no_more() -> None:
    ranks = HostRanksInTurn(1, host_pages=64, store=False)
    (cache,) = ranks.caches
    for pages in range(1, 20):
        cache.back_up("r", list(range(pages * PAGE_TOKENS)), range(pages))
        ranks.complete()

    request = cache.inspection.requests.known("r")
    assert isinstance(request, LentRequest)
    assert len(request.copies) <= 1
