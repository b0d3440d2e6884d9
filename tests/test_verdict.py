"""Verdicts: what every rank reads from the fold of all ballots."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import UNBOUNDED, Answered, Ballot, Capped, Ended, Expired, Landed
from lockstep.coordinator.fold import fold
from lockstep.coordinator.lanes import BallotShape, Layout, Slot, Voter, encode
from lockstep.coordinator.operation import Phase, Queue
from lockstep.coordinator.verdict import (
    Arrived,
    Found,
    Verdict,
    Watermark,
    read,
    unhealthy_rank,
)

pages = st.integers(0, 1 << 20)


def verdict_of(
    ballots: Sequence[Ballot], *slots: Slot, times_ms: Sequence[int] | None = None
) -> Verdict:
    """Encode each rank's ballot, fold, and read."""
    shape = BallotShape(world_size=len(ballots), slots=4)
    layout = Layout(epoch=1, round=6, state_digest=1, slots=slots)
    return read(
        shape,
        layout,
        fold(
            [
                encode(
                    shape,
                    layout,
                    ballot,
                    Voter(rank=rank, healthy=True, time_ms=times_ms[rank] if times_ms else 0),
                )
                for rank, ballot in enumerate(ballots)
            ]
        ),
    )


def expecting(ranks: int, *operations: int) -> list[Ballot]:
    ballots = [Ballot() for _ in range(ranks)]
    for ballot in ballots:
        for operation in operations:
            ballot.expect(operation)
    return ballots


def lowest(values: Sequence[int]) -> tuple[int, int]:
    """Return the smallest value and the lowest rank that has it."""
    return min(values), list(values).index(min(values))


@given(answers=st.lists(pages, min_size=1, max_size=8))
def test_a_lookup_comes_to_the_fewest_pages_and_names_the_lowest_such_rank(
    answers: list[int],
) -> None:
    """Rule R2: not a bare count."""
    ballots = expecting(len(answers), 3)
    for ballot, answer in zip(ballots, answers, strict=True):
        ballot.note(Answered(3, answer))
    fewest, rank = lowest(answers)

    assert verdict_of(ballots, Slot(3, Phase.QUERY)).slots == (
        Found(
            operation=3,
            bound=UNBOUNDED,
            pages=fewest,
            shortest_rank=rank,
            longest=max(answers),
            expired_rank=None,
        ),
    )


@given(answers=st.lists(st.none() | pages, min_size=1, max_size=8).filter(lambda a: None in a))
def test_a_lookup_has_no_answer_while_one_rank_has_none(answers: list[int | None]) -> None:
    ballots = expecting(len(answers), 3)
    for ballot, answer in zip(ballots, answers, strict=True):
        if answer is not None:
            ballot.note(Answered(3, answer))

    assert verdict_of(ballots, Slot(3, Phase.QUERY)).slots == (
        Found(
            operation=3,
            bound=UNBOUNDED,
            pages=None,
            shortest_rank=None,
            longest=None,
            expired_rank=None,
        ),
    )


@given(ranks=st.lists(st.tuples(pages, st.none() | pages), min_size=1, max_size=8))
def test_a_transfer_comes_to_what_landed_everywhere_under_the_lowest_ceiling(
    ranks: list[tuple[int, int | None]],
) -> None:
    ballots = expecting(len(ranks), 3)
    for ballot, (landed, ceiling) in zip(ballots, ranks, strict=True):
        ballot.note(Landed(3, landed))
        if ceiling is not None:
            ballot.note(Capped(3, ceiling))
    ceilings = [(ceiling, rank) for rank, (_, ceiling) in enumerate(ranks) if ceiling is not None]
    ceiling, ceiling_rank = min(ceilings, default=(None, None))

    assert verdict_of(ballots, Slot(3, Phase.TRANSFER)).slots == (
        Arrived(
            operation=3,
            pages=min(landed for landed, _ in ranks),
            ceiling=ceiling,
            ceiling_rank=ceiling_rank,
            expired_rank=None,
        ),
    )


@pytest.mark.parametrize("phase", [Phase.QUERY, Phase.TRANSFER])
def test_a_deadline_that_any_rank_saw_pass_is_everyones(phase: Phase) -> None:
    """Section 6: a deadline, seen by any rank, stops all."""
    ballots = expecting(3, 4)
    ballots[1].note(Expired(4))

    (slot,) = verdict_of(ballots, Slot(4, phase)).slots

    assert slot.expired_rank == 1


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
    """Section 7: each list is one rank's outcomes of tickets 1 to 6; None still runs."""
    ballots = [Ballot() for _ in ranks]
    for ballot, outcomes in zip(ballots, ranks, strict=True):
        for ticket, ok in enumerate(outcomes, start=1):
            ballot.enqueue(Queue.LOAD_BACK, ticket, 50 + ticket)
            if ok is not None:
                ballot.note(Ended(50 + ticket, ok=ok))
    runs = [next((at for at, ok in enumerate(each) if ok is not True), 6) for each in ranks]
    failed = [
        (ticket, rank)
        for rank, outcomes in enumerate(ranks)
        for ticket, ok in enumerate(outcomes, start=1)
        if ok is False
    ]
    first_failed, failed_rank = min(failed, default=(None, None))

    verdict = verdict_of(ballots)

    assert verdict.watermarks[Queue.LOAD_BACK] == Watermark(
        ended_through=min(runs), first_failed=first_failed, failed_rank=failed_rank
    )
    for queue in set(Queue) - {Queue.LOAD_BACK}:
        assert verdict.watermarks[queue] == Watermark(
            ended_through=0, first_failed=None, failed_rank=None
        )


def test_slots_are_read_in_the_order_of_the_layout() -> None:
    ballots = expecting(2, 1, 2, 3)
    for ballot in ballots:
        ballot.note(Answered(2, 20))
        ballot.note(Landed(3, 30))
        ballot.note(Landed(1, 10))
    slots = (Slot(3, Phase.TRANSFER), Slot(2, Phase.QUERY), Slot(1, Phase.TRANSFER))

    read_slots = verdict_of(ballots, *slots).slots

    assert [(each.operation, each.pages) for each in read_slots] == [(3, 30), (2, 20), (1, 10)]


@given(times_ms=st.lists(st.integers(0, 1 << 50), min_size=1, max_size=8))
def test_agreed_time_is_the_slowest_clock(times_ms: list[int]) -> None:
    """Rule R14: wall-clock time is an agreed lane."""
    verdict = verdict_of([Ballot() for _ in times_ms], times_ms=times_ms)

    assert verdict.time_ms == min(times_ms)
    assert verdict.round == 6


@given(healthy=st.lists(st.booleans(), min_size=1, max_size=8))
def test_one_rank_that_cannot_go_on_is_named(healthy: list[bool]) -> None:
    shape = BallotShape(world_size=len(healthy), slots=0)
    layout = Layout(epoch=1, round=1, state_digest=0, slots=())
    folded = fold(
        [
            encode(shape, layout, Ballot(), Voter(rank=rank, healthy=well, time_ms=0))
            for rank, well in enumerate(healthy)
        ]
    )
    ill = [rank for rank, well in enumerate(healthy) if not well]

    assert unhealthy_rank(folded) == max(ill, default=None)


def test_a_verdict_is_data_of_its_own_and_keeps_no_view_of_the_vector() -> None:
    """Rules R6, R7."""
    shape = BallotShape(world_size=1, slots=1)
    layout = Layout(epoch=1, round=1, state_digest=0, slots=(Slot(3, Phase.QUERY),))
    ballot = Ballot()
    ballot.expect(3)
    ballot.note(Answered(3, 5))
    vector = encode(shape, layout, ballot, Voter(rank=0, healthy=True, time_ms=7))
    verdict = read(shape, layout, vector)
    before = repr(verdict)

    vector[:] = np.int64(0)

    assert repr(verdict) == before
    with pytest.raises(AttributeError):
        verdict.time_ms = 8  # type: ignore[misc]
