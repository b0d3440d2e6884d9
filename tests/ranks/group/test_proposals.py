"""Rule R14: proposals of single ranks become one command in one step on all ranks, or on none."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import (
    Answered,
    Ballot,
    Landed,
    Progress,
    Quiesced,
    QuiesceExpired,
    TransferEnded,
)
from lockstep.coordinator.lanes import NEUTRAL, BallotShape, LaneLayout, Voter, fold
from lockstep.coordinator.prefetch_slots import PrefetchSlots
from lockstep.coordinator.proposal import (
    NOTHING_STAGED,
    Change,
    Proposal,
    Readiness,
    StagedLanes,
    change_of,
)
from lockstep.coordinator.verdict import Proposed, Verdicts
from lockstep.errors import ConfigError, PeerLost, StorageError, UsageError
from lockstep.ranks.protocol.config import Bounds
from lockstep.ranks.protocol.orders import (
    AttachStore,
    Cancel,
    CopyToHost,
    DetachStore,
    Fetch,
    LookUp,
    Order,
    Put,
)
from lockstep.ranks.replica.attaching import StoreState
from lockstep.ranks.replica.tree.node import HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn, prompt

URI = "memory://other"
OrderT = TypeVar("OrderT", bound=Order)


def voted(*staged: StagedLanes) -> Proposed | None:
    """Let each rank stage one of the values in a round; return the proposal in the round's verdict."""
    shape = BallotShape(world_size=len(staged), prefetch_slots=1)
    layout = LaneLayout(epoch=1, round=1, state_digest=1, prefetch_slots=PrefetchSlots(1).freeze())
    vectors = [
        Ballot(shape, rank).fill(layout, Voter(healthy=True, time_ms=0, staged=each))
        for rank, each in enumerate(staged)
    ]
    return Verdicts(shape).read(layout, fold(vectors)).proposed


digests = st.builds(Proposal, st.sampled_from(Change), st.text(max_size=8)).map(
    lambda proposal: proposal.digest
)
something = st.builds(
    StagedLanes,
    digests,
    st.sampled_from([each for each in Readiness if each is not Readiness.UNSTAGED]),
)


@given(st.lists(st.just(NOTHING_STAGED) | something, min_size=1, max_size=5))
def test_the_lanes_say_what_is_staged_whether_all_have_it_and_how_far_they_are(
    staged: list[StagedLanes],
) -> None:
    have = {each.proposal for each in staged if each != NOTHING_STAGED}
    refusing = [rank for rank, each in enumerate(staged) if each.readiness is Readiness.REFUSED]

    assert voted(*staged) == (
        Proposed(
            proposal=min(have),
            differs=len(have) > 1,
            readiness=min(each.readiness for each in staged),
            refused_rank=max(refusing, default=None),
        )
        if have
        else None
    )


@given(st.sampled_from(Change), st.text(max_size=20))
def test_a_digest_names_the_change_and_fits_its_lanes(change: Change, store: str) -> None:
    digest = Proposal(change, store).digest

    assert 0 < digest < NEUTRAL
    assert change_of(digest) is change
    assert digest == Proposal(change, store).digest != Proposal(change, f"{store}?").digest


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def depth(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


def attach(ranks: RanksInTurn, *which: int) -> "list[Future[None]]":
    return [ranks.caches[rank].attach_store(URI) for rank in which]


def detach(ranks: RanksInTurn) -> "list[Future[None]]":
    return [cache.detach_store() for cache in ranks.caches]


def say(ranks: RanksInTurn, rank: int, readiness: Readiness | str) -> None:
    staged = ranks.executors[rank].staged
    staged.update(dict.fromkeys(staged, readiness))


def ready(ranks: RanksInTurn) -> None:
    for rank in range(len(ranks.caches)):
        say(ranks, rank, Readiness.READY)
    for _ in range(2):
        ranks.step()


def state(ranks: RanksInTurn) -> StoreState:
    return ranks.every(lambda cache: cache.store_state())


def taken(ranks: RanksInTurn, kind: type[OrderT]) -> list[OrderT]:
    """Remove and return the orders of one kind; all ranks must have equal ones."""
    orders = [executor.take(kind) for executor in ranks.executors]
    assert all(each == orders[0] for each in orders)
    return orders[0]


def refusals(outcomes: "Sequence[Future[None]]") -> set[str]:
    errors = [outcome.exception(timeout=0) for outcome in outcomes]
    assert all(isinstance(each, StorageError) for each in errors)
    return {str(each) for each in errors}


def test_each_rank_that_cannot_open_the_store_says_why_for_itself(depth: int) -> None:
    ranks = RanksInTurn(2, depth=depth, store=False)
    outcomes = attach(ranks, 0, 1)
    say(ranks, 0, "no route")
    say(ranks, 1, "nobody answers")
    ranks.step()
    ranks.step()

    first, second = (str(outcome.exception(timeout=0)) for outcome in outcomes)
    assert first.endswith(
        "': rank 0 cannot open it: no route; rank 1 cannot open it; its log says why"
    )
    assert second.endswith("': rank 1 cannot open it: nobody answers")
    assert state(ranks) is StoreState.DETACHED


def test_what_does_not_become_ready_in_time_is_withdrawn(depth: int) -> None:
    """Rule R10: a proposal that is not ready on all ranks by a deadline in agreed time is withdrawn."""
    ranks = RanksInTurn(2, depth=depth, store=False)
    outcomes = attach(ranks, 0, 1)
    say(ranks, 0, Readiness.READY)
    for _ in range(2):
        ranks.step()
    # Agreed time is the lowest of all ranks' clocks, so a jump of one clock alone does not reach the
    # deadline.
    ranks.now_ms[0] += 500_000
    for _ in range(2):
        ranks.step()
    assert state(ranks) is StoreState.ATTACHING

    ranks.now_ms[1] += 180_002
    for _ in range(2):
        ranks.step()

    assert state(ranks) is StoreState.DETACHED
    assert all("not ready on every rank within 180 s" in refusal for refusal in refusals(outcomes))


def test_a_second_store_is_not_attached_beside_the_first(depth: int) -> None:
    ranks = RanksInTurn(2, depth=depth)
    outcomes = attach(ranks, 1)
    ready(ranks)

    assert state(ranks) is StoreState.ATTACHED
    assert all(refusal.endswith("is attached; detach it first") for refusal in refusals(outcomes))


def test_the_same_again_joins_what_is_staged_and_something_else_is_refused() -> None:
    ranks = RanksInTurn(1, store=False)
    cache = ranks.caches[0]
    first, again = attach(ranks, 0, 0)

    assert first is again
    assert not first.cancel()
    with pytest.raises(UsageError, match="attach store 'memory://other' is not decided yet"):
        cache.detach_store()
    ready(ranks)
    assert cache.detach_store() is not first


def test_a_store_needs_host_memory() -> None:
    ranks = RanksInTurn(1, store=False, host_pages=0)

    with pytest.raises(ConfigError, match="host_pages"):
        attach(ranks, 0)


def test_who_waits_for_a_proposal_hears_that_the_group_has_ended() -> None:
    ranks = RanksInTurn(2, store=False)
    (outcome,) = attach(ranks, 0)
    ranks.group.leave(1)

    with pytest.raises(PeerLost):
        ranks.caches[0].step()

    assert isinstance(outcome.exception(timeout=0), PeerLost)
    with pytest.raises(PeerLost):
        attach(ranks, 0)


def test_who_waits_for_a_proposal_hears_that_the_cache_was_closed() -> None:
    ranks = RanksInTurn(1, store=False)
    (outcome,) = attach(ranks, 0)

    ranks.caches[0].close(flush=False)

    assert isinstance(outcome.exception(timeout=0), UsageError)
    with pytest.raises(UsageError, match="closed"):
        attach(ranks, 0)


def test_a_detach_ends_lookups_and_what_waits_at_once(depth: int) -> None:
    ranks = RanksInTurn(2, depth=depth, bounds=Bounds(prefetches=1))
    for number in range(3):
        ranks.every(lambda cache, n=number: cache.prefetch(f"r{n}", prompt(3, start=100 * n)))  # type: ignore[misc]
    (lookup,) = taken(ranks, LookUp)

    outcomes = detach(ranks)
    ready(ranks)

    assert [outcome.exception(timeout=0) for outcome in outcomes] == [None, None]
    assert state(ranks) is StoreState.DETACHED
    assert [order.operation for order in taken(ranks, Cancel)] == [lookup.operation]
    assert taken(ranks, DetachStore) == [DetachStore()]
    assert taken(ranks, LookUp) == []
    assert ranks.every(lambda cache: cache.stats().operations["prefetch"]) == {"aborted": 3}
    assert not ranks.every(lambda cache: cache.prefetch("r3", prompt(3)))


class Busy:
    """Ranks with a partly landed prefetch and a persist in flight."""

    def __init__(self, depth: int, **bounds: int) -> None:
        self.ranks = ranks = RanksInTurn(2, depth=depth, bounds=Bounds(**bounds))
        ranks.publish("writer", prompt(2, start=500))
        (copy,) = taken(ranks, CopyToHost)
        self.both(TransferEnded(copy.operation, ok=True))
        self.persist = taken(ranks, Put)[0].operation
        ranks.every(lambda cache: cache.prefetch("reader", prompt(8)))
        self.fetch = taken(ranks, LookUp)[0].operation
        self.both(Answered(self.fetch, 8))
        assert taken(ranks, Fetch)[0].operation == self.fetch
        for executor, pages in zip(ranks.executors, (5, 3), strict=True):
            executor.reports.append(Landed(self.fetch, pages))
        for _ in range(1 + depth):
            ranks.step()

    def both(self, progress: Progress) -> None:
        self.ranks.report(progress)
        for _ in range(1 + self.ranks.depth):
            self.ranks.step()


def test_a_detach_keeps_what_has_landed_and_drains_what_is_in_flight(depth: int) -> None:
    busy = Busy(depth)
    ranks = busy.ranks
    detach(ranks)
    ready(ranks)

    assert state(ranks) is StoreState.DRAINING
    assert ranks.phase(busy.fetch) == ranks.phase(busy.persist) == "QUIESCE"
    assert {order.operation for order in taken(ranks, Cancel)} == {busy.fetch, busy.persist}
    assert ranks.every(lambda cache: cache.match(prompt(8))).host_tokens == 3 * PAGE_TOKENS
    assert taken(ranks, DetachStore) == []

    # A new store may be proposed while the old one drains, but is attached only after the drain.
    outcomes = attach(ranks, 0, 1)
    ready(ranks)
    busy.both(Quiesced(busy.persist))
    assert state(ranks) is StoreState.DRAINING
    assert taken(ranks, AttachStore) == []

    busy.both(Quiesced(busy.fetch))
    assert state(ranks) is StoreState.ATTACHED
    assert [outcome.exception(timeout=0) for outcome in outcomes] == [None, None]
    orders = [type(each) for each in ranks.executors[0].orders]
    assert orders.index(DetachStore) < orders.index(AttachStore)


def test_what_an_old_store_keeps_in_quarantine_is_not_held_against_the_next(depth: int) -> None:
    busy = Busy(depth, quarantine_pages=3)
    ranks = busy.ranks
    free = ranks.free(HOST)
    ranks.every(lambda cache: cache.abort("reader"))
    ranks.executors[1].reports.append(QuiesceExpired(busy.fetch))
    for _ in range(2):
        ranks.step()
    assert ranks.phase(busy.fetch) == "QUARANTINED"
    assert state(ranks) is StoreState.DRAINING
    busy.both(Quiesced(busy.persist))
    assert state(ranks) is StoreState.LOST

    attach(ranks, 0, 1)
    ready(ranks)
    assert state(ranks) is StoreState.ATTACHED
    assert ranks.phase(busy.fetch) == "QUARANTINED"
    assert not ranks.every(lambda cache: cache.inspection.store_keeps_too_much)

    busy.both(Quiesced(busy.fetch))
    assert ranks.phase(busy.fetch) == "DONE"
    assert ranks.free(HOST) == free + 5
    assert state(ranks) is StoreState.ATTACHED


def hang(ranks: RanksInTurn, request: str, pages: int, start: int) -> None:
    """Run a prefetch whose read never ends, until its pages are quarantined."""
    ranks.every(lambda cache: cache.prefetch(request, prompt(pages, start=start)))
    (look,) = taken(ranks, LookUp)
    ranks.report(Answered(look.operation, pages))
    for _ in range(1 + ranks.depth):
        ranks.step()
    assert taken(ranks, Fetch)[0].operation == look.operation
    ranks.every(lambda cache: cache.abort(request))
    ranks.executors[1].reports.append(QuiesceExpired(look.operation))
    for _ in range(2 + ranks.depth):
        ranks.step()
    assert ranks.phase(look.operation) == "QUARANTINED"


def test_stores_that_keep_most_of_host_memory_let_no_other_be_attached(depth: int) -> None:
    """Rule R10: no store can be attached if quarantines of earlier stores keep most host pages."""
    ranks = RanksInTurn(2, depth=depth, host_pages=16, bounds=Bounds(quarantine_pages=3))
    hang(ranks, "first", 8, start=0)
    attach(ranks, 0, 1)
    ready(ranks)
    assert state(ranks) is StoreState.ATTACHED
    hang(ranks, "second", 4, start=500)
    assert state(ranks) is StoreState.LOST

    outcomes = attach(ranks, 0, 1)
    ready(ranks)

    assert state(ranks) is StoreState.LOST
    for outcome in outcomes:
        with pytest.raises(StorageError, match="keep 12 of 16 host pages; restore or restart"):
            outcome.result(timeout=0)


def test_to_detach_without_a_store_is_done_at_once_and_keeps_nothing_waiting(depth: int) -> None:
    ranks = RanksInTurn(2, depth=depth, store=False)
    again = ranks.caches[0].detach_store()
    for _ in range(2):
        ranks.step()
    assert again.exception(timeout=0) is None
    assert state(ranks) is StoreState.DETACHED

    outcomes = attach(ranks, 0, 1)
    ready(ranks)
    assert [outcome.exception(timeout=0) for outcome in outcomes] == [None, None]


def test_an_error_that_is_raised_again_and_again_keeps_nothing_of_it() -> None:
    ranks = RanksInTurn(1, store=False)
    ranks.caches[0].close(flush=False)

    def frames() -> int:
        with pytest.raises(UsageError) as raised:
            ranks.caches[0].attach_store(URI)
        return len(raised.traceback)

    assert frames() == frames() == frames()


def persisted(ranks: RanksInTurn, name: str, pages: int) -> int:
    """Publish pages of a request; return the number of pages that are then written to the store."""
    ranks.publish(name, prompt(pages))
    written = 0
    for _ in range(8):
        orders = ranks.executors[0].given(Put)
        written += sum(len(each.keys) for order in orders for each in order.transfers)
        ranks.complete()
    return written


def test_what_was_in_host_memory_is_written_with_what_continues_it(depth: int) -> None:
    """Host pages from before the attach are written together with later pages of the same prompt."""
    ranks = RanksInTurn(2, depth=depth, store=False)
    ranks.compute("before", prompt(3))
    attach(ranks, 0, 1)
    ready(ranks)

    assert persisted(ranks, "after", 5) == 5
    assert persisted(ranks, "later", 7) == 2
