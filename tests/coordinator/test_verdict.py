"""Verdicts: the conclusions that every rank reads from the fold of all ballots."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Answered, Ballot, Capped, Expired, Landed, TransferEnded
from lockstep.coordinator.lanes import BallotShape, LaneLayout, Voter, fold, read_header
from lockstep.coordinator.operation import Phase, Queue
from lockstep.coordinator.prefetch_slots import UNBOUNDED, PrefetchSlot, PrefetchSlots
from lockstep.coordinator.verdict import (
    PrefetchArrived,
    PrefetchFound,
    Verdict,
    Verdicts,
    Watermark,
    unhealthy_rank,
)

ROOM = 4
pages = st.integers(0, 1 << 20)


class Group:
    def __init__(self, ranks: int) -> None:
        shape = BallotShape(world_size=ranks, prefetch_slots=ROOM)
        self.prefetch_slots = PrefetchSlots(ROOM)
        self.ballots = [Ballot(shape, rank) for rank in range(ranks)]
        self.rounds = 5
        self._verdicts = Verdicts(shape)

    def take(self, *prefetch_slots: PrefetchSlot) -> list[int]:
        """Give each operation a prefetch slot, in the order given; return the slot numbers."""
        numbers: list[int] = []
        for each in prefetch_slots:
            numbers.append(self.prefetch_slots.take(each.operation, each.phase, each.bound))
            for ballot in self.ballots:
                ballot.assign_slot(each.operation, numbers[-1], each.phase, each.bound)
        return numbers

    def vote(self, *, times_ms: Sequence[int] | None = None) -> Verdict:
        self.rounds += 1
        layout = LaneLayout(
            epoch=1, round=self.rounds, state_digest=1, prefetch_slots=self.prefetch_slots.freeze()
        )
        vectors = [
            ballot.fill(layout, Voter(healthy=True, time_ms=times_ms[rank] if times_ms else 0))
            for rank, ballot in enumerate(self.ballots)
        ]
        return self._verdicts.read(layout, fold(vectors))


def lowest(values: Sequence[int]) -> tuple[int, int]:
    return min(values), list(values).index(min(values))


@given(answers=st.lists(pages, min_size=1, max_size=8))
def test_a_lookup_comes_to_the_fewest_pages_and_names_the_lowest_such_rank(
    answers: list[int],
) -> None:
    group = Group(len(answers))
    group.take(PrefetchSlot(3, Phase.QUERY))
    for ballot, answer in zip(group.ballots, answers, strict=True):
        ballot.note(Answered(3, answer))
    fewest, rank = lowest(answers)

    assert group.vote().prefetch_slots == (
        PrefetchFound(
            operation=3,
            bound=UNBOUNDED,
            pages=fewest,
            shortest_rank=rank,
            longest=max(answers),
            expired_rank=None,
        ),
    )


@given(answers=st.lists(st.none() | pages, min_size=1, max_size=8).filter(lambda a: None in a))
def test_a_lookup_that_one_rank_has_not_answered_is_no_news_but_for_its_deadline(
    answers: list[int | None],
) -> None:
    group = Group(len(answers))
    group.take(PrefetchSlot(3, Phase.QUERY))
    answered = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    for rank, answer in answered:
        group.ballots[rank].note(Answered(3, answer))
    assert group.vote().prefetch_slots == ()
    group.ballots[-1].note(Expired(3))

    assert group.vote().prefetch_slots == (
        PrefetchFound(
            operation=3,
            bound=UNBOUNDED,
            pages=None,
            shortest_rank=None,
            longest=None,
            expired_rank=len(answers) - 1,
        ),
    )


@given(ranks=st.lists(st.tuples(pages, st.none() | pages), min_size=1, max_size=8))
def test_a_transfer_comes_to_what_landed_everywhere_under_the_lowest_ceiling(
    ranks: list[tuple[int, int | None]],
) -> None:
    group = Group(len(ranks))
    group.take(PrefetchSlot(3, Phase.TRANSFER))
    for ballot, (landed, _) in zip(group.ballots, ranks, strict=True):
        ballot.note(Landed(3, landed))
    ceilings = [(ceiling, rank) for rank, (_, ceiling) in enumerate(ranks) if ceiling is not None]
    for ceiling, rank in ceilings:
        group.ballots[rank].note(Capped(3, ceiling))
    lowest_ceiling, ceiling_rank = min(ceilings, default=(None, None))
    fewest = min(landed for landed, _ in ranks)
    arrived = PrefetchArrived(
        operation=3,
        pages=fewest,
        ceiling=lowest_ceiling,
        ceiling_rank=ceiling_rank,
        expired_rank=None,
    )

    # A verdict names no prefetch slot while no page has landed and none is known to be missing.
    assert group.vote().prefetch_slots == ((arrived,) if fewest or ceilings else ())


@given(
    ranks=st.lists(
        st.lists(st.sampled_from([None, True, False]), min_size=6, max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_a_watermark_is_the_lowest_and_names_the_first_failed_ticket_and_who_saw_it(
    ranks: list[list[bool | None]],
) -> None:
    """Section 7: a verdict has the lowest watermark of all ranks, and names the first failure."""
    group = Group(len(ranks))
    for ballot, queue_index in product(group.ballots, range(1, 7)):
        ballot.enqueue(Queue.LOAD_BACK, queue_index, 50 + queue_index)
    ended = [
        (queue_index, rank, ok)
        for rank, outcomes in enumerate(ranks)
        for queue_index, ok in enumerate(outcomes, start=1)
        if ok is not None
    ]
    for queue_index, rank, ok in ended:
        group.ballots[rank].note(TransferEnded(50 + queue_index, ok=ok))
    runs = [next((at for at, ok in enumerate(each) if ok is not True), 6) for each in ranks]
    failed = [(queue_index, rank) for queue_index, rank, ok in ended if not ok]
    first_failed, failed_rank = min(failed, default=(None, None))

    assert group.vote().watermarks == tuple(
        Watermark(
            queue=queue,
            ended_through=min(runs),
            first_failed=first_failed,
            failed_rank=failed_rank,
        )
        if queue is Queue.LOAD_BACK
        else Watermark(queue=queue, ended_through=0, first_failed=None, failed_rank=None)
        for queue in Queue
    )


def test_prefetch_slots_are_read_in_the_order_of_their_operations() -> None:
    """Section 2: the replica applies verdicts in operation order, whatever the slot order."""
    group = Group(2)
    group.take(
        PrefetchSlot(3, Phase.TRANSFER),
        PrefetchSlot(2, Phase.QUERY),
        PrefetchSlot(1, Phase.TRANSFER),
    )
    for ballot in group.ballots:
        ballot.note(Answered(2, 20))
        ballot.note(Landed(3, 30))
        ballot.note(Landed(1, 10))

    prefetch_slots = group.vote().prefetch_slots

    assert [(each.operation, each.pages) for each in prefetch_slots] == [(1, 10), (2, 20), (3, 30)]


def test_what_is_as_it_was_is_no_news() -> None:
    group = Group(2)
    group.take(PrefetchSlot(1, Phase.TRANSFER), PrefetchSlot(2, Phase.QUERY))
    for ballot in group.ballots:
        ballot.note(Landed(1, 10))
        ballot.note(Answered(2, 20))
    assert len(group.vote().prefetch_slots) == 2

    again = group.vote()

    assert (again.prefetch_slots, again.watermarks, again.round) == ((), (), 7)


def test_a_prefetch_slot_is_news_when_its_lanes_differ_and_the_others_are_not() -> None:
    group = Group(2)
    group.take(
        PrefetchSlot(1, Phase.TRANSFER),
        PrefetchSlot(2, Phase.QUERY),
        PrefetchSlot(3, Phase.TRANSFER),
    )
    group.vote()
    group.ballots[0].note(Landed(1, 5))
    assert group.vote().prefetch_slots == (), "the smallest is what it was"
    group.ballots[1].note(Landed(1, 4))
    group.ballots[0].note(Expired(3))

    news = group.vote().prefetch_slots

    assert [(each.operation, each.pages, each.expired_rank) for each in news] == [
        (1, 4, None),
        (3, 0, 0),
    ]


@pytest.mark.parametrize(
    "after", [PrefetchSlot(1, Phase.RESTORABLE, 9), PrefetchSlot(1, Phase.QUERY, 9)]
)
def test_equal_lanes_are_news_under_another_phase_or_bound(after: PrefetchSlot) -> None:
    group = Group(1)
    (prefetch_slot,) = group.take(PrefetchSlot(1, Phase.QUERY, 10))
    group.ballots[0].note(Answered(1, 9))
    first = group.vote()
    group.prefetch_slots.change(prefetch_slot, after.phase, after.bound)
    group.ballots[0].assign_slot(1, prefetch_slot, after.phase, after.bound)

    second = group.vote()

    assert [(each.operation, each.pages) for each in first.prefetch_slots] == [(1, 9)]
    assert [(each.operation, each.pages) for each in second.prefetch_slots] == [(1, 9)]


def test_equal_lanes_are_news_when_they_are_those_of_another_operation() -> None:
    group = Group(1)
    (prefetch_slot,) = group.take(PrefetchSlot(1, Phase.QUERY, 10))
    group.ballots[0].note(Answered(1, 9))
    first = group.vote()
    group.prefetch_slots.give_back(prefetch_slot)
    group.ballots[0].forget(1)
    assert group.take(PrefetchSlot(2, Phase.QUERY, 10)) == [prefetch_slot]
    group.ballots[0].note(Answered(2, 9))

    second = group.vote()

    assert [(each.operation, each.pages) for each in first.prefetch_slots] == [(1, 9)]
    assert [(each.operation, each.pages) for each in second.prefetch_slots] == [(2, 9)]


def test_a_prefetch_slot_that_became_free_is_no_news() -> None:
    group = Group(2)
    (prefetch_slot,) = group.take(PrefetchSlot(1, Phase.TRANSFER))
    group.vote()
    group.prefetch_slots.give_back(prefetch_slot)
    for ballot in group.ballots:
        ballot.forget(1)

    assert group.vote().prefetch_slots == ()


def test_a_queue_is_news_when_either_of_its_lanes_differs() -> None:
    group = Group(2)
    for ballot in group.ballots:
        for queue_index in (1, 2, 3):
            ballot.enqueue(Queue.PERSIST, queue_index, queue_index)
    group.vote()
    group.ballots[1].note(TransferEnded(2, ok=False))
    (failed,) = group.vote().watermarks
    for ballot in group.ballots:
        ballot.note(TransferEnded(1, ok=True))
    (ended,) = group.vote().watermarks

    assert failed == Watermark(queue=Queue.PERSIST, ended_through=0, first_failed=2, failed_rank=1)
    assert ended == Watermark(queue=Queue.PERSIST, ended_through=1, first_failed=2, failed_rank=1)
    assert group.vote().watermarks == ()


@given(times_ms=st.lists(st.integers(0, 1 << 50), min_size=1, max_size=8))
def test_agreed_time_is_the_slowest_clock(times_ms: list[int]) -> None:
    verdict = Group(len(times_ms)).vote(times_ms=times_ms)

    assert verdict.time_ms == min(times_ms)
    assert verdict.round == 6


@given(healthy=st.lists(st.booleans(), min_size=1, max_size=8))
def test_one_rank_that_cannot_go_on_is_named(healthy: list[bool]) -> None:
    shape = BallotShape(world_size=len(healthy), prefetch_slots=0)
    layout = LaneLayout(epoch=1, round=1, state_digest=0, prefetch_slots=PrefetchSlots(0).freeze())
    folded = fold(
        [
            Ballot(shape, rank).fill(layout, Voter(healthy=well, time_ms=0))
            for rank, well in enumerate(healthy)
        ]
    )
    ill = [rank for rank, well in enumerate(healthy) if not well]

    assert unhealthy_rank(read_header(folded.data)) == max(ill, default=None)


def test_a_verdict_is_data_of_its_own_and_keeps_no_view_of_the_vector() -> None:
    """Rules R6, R7: a verdict is immutable and shares no memory with the vector."""
    shape = BallotShape(world_size=1, prefetch_slots=1)
    prefetch_slots, ballot, verdicts = PrefetchSlots(1), Ballot(shape, 0), Verdicts(shape)
    ballot.assign_slot(3, prefetch_slots.take(3, Phase.QUERY), Phase.QUERY)
    ballot.note(Answered(3, 5))
    layout = LaneLayout(epoch=1, round=1, state_digest=0, prefetch_slots=prefetch_slots.freeze())
    vector = ballot.fill(layout, Voter(healthy=True, time_ms=7))
    kept = vector.copy()
    verdict = verdicts.read(layout, vector)
    before = repr(verdict)

    vector[:] = np.int64(0)

    assert repr(verdict) == before
    assert verdicts.read(layout, kept).prefetch_slots == (), (
        "the vector that was read is compared, not this"
    )
    with pytest.raises(AttributeError):
        verdict.time_ms = 8  # type: ignore[misc]
