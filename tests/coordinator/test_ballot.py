"""Ballots: levels that only rise, and watermarks that follow the order of their tickets."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import (
    Answered,
    Ballot,
    Capped,
    Ended,
    Expired,
    Landed,
    Progress,
    Quiesced,
    QuiesceExpired,
    Sightings,
)
from lockstep.coordinator.lanes import BallotShape
from lockstep.coordinator.operation import Queue
from lockstep.coordinator.seats import UNBOUNDED

OPERATION = 7
SHAPE = BallotShape(world_size=1, seats=2)

counts = st.integers(min_value=0, max_value=20)


@st.composite
def reports(draw: st.DrawFn) -> list[Progress]:
    """What an executor may say of one operation: it answers once, and a copy ends once."""
    said: list[Progress] = [Landed(OPERATION, pages) for pages in draw(st.lists(counts))]
    said += [Capped(OPERATION, pages) for pages in draw(st.lists(counts))]
    once: Sequence[Progress] = (
        Answered(OPERATION, draw(counts)),
        Ended(OPERATION, ok=draw(st.booleans())),
        Expired(OPERATION),
        Quiesced(OPERATION),
        QuiesceExpired(OPERATION),
    )
    said += [each for each in once if draw(st.booleans())]
    return said


@given(said=reports(), data=st.data())
def test_the_order_and_the_number_of_reports_do_not_matter(
    said: list[Progress], data: st.DataObject
) -> None:
    """Rule R13: losing the order, or saying a thing twice, changes nothing."""
    again = data.draw(st.lists(st.sampled_from(said)) if said else st.just([]))
    other = data.draw(st.permutations(said + again))

    assert seen_after(other) == seen_after(said)


@given(said=reports(), data=st.data())
def test_no_report_lowers_a_level(said: list[Progress], data: st.DataObject) -> None:
    """Rule R13."""
    ballot = Ballot(SHAPE, 0)
    ballot.expect(OPERATION)
    levels = [levels_of(ballot)]
    for progress in data.draw(st.permutations(said)):
        ballot.note(progress)
        levels.append(levels_of(ballot))

    assert all(
        low <= high
        for before, after in pairwise(levels)
        for low, high in zip(before, after, strict=True)
    ), levels


@given(said=reports())
def test_what_is_not_expected_leaves_nothing_behind(said: list[Progress]) -> None:
    """Rule R13: a report that comes after its operation has ended is no news of anything."""
    ballot = Ballot(SHAPE, 0)
    ballot.expect(OPERATION)
    ballot.forget(OPERATION)
    for progress in said:
        ballot.note(progress)
    assert ballot.sightings(OPERATION) == Sightings()

    ballot.expect(OPERATION)
    assert ballot.sightings(OPERATION) == Sightings()


def test_expecting_again_keeps_what_was_seen() -> None:
    ballot = Ballot(SHAPE, 0)
    ballot.expect(OPERATION)
    ballot.note(Landed(OPERATION, 3))
    ballot.expect(OPERATION)

    assert ballot.sightings(OPERATION) == Sightings(landed=3)


def test_operations_do_not_see_each_other() -> None:
    ballot = Ballot(SHAPE, 0)
    ballot.expect(1)
    ballot.expect(2)
    ballot.note(Capped(2, 4))

    assert ballot.sightings(1).ceiling == UNBOUNDED
    assert ballot.sightings(2).ceiling == 4


def test_a_failure_is_voted_while_earlier_tickets_still_run() -> None:
    ballot = Ballot(SHAPE, 0)
    for ticket in (1, 2, 3):
        ballot.enqueue(Queue.PERSIST, ticket, operation_of(ticket))
    ballot.note(Ended(operation_of(3), ok=True))
    ballot.note(Ended(operation_of(2), ok=False))

    assert ballot.watermark(Queue.PERSIST) == (0, 2)
    ballot.note(Ended(operation_of(1), ok=True))
    assert ballot.watermark(Queue.PERSIST) == (1, 2)
    ballot.dequeue(Queue.PERSIST, 2)
    assert ballot.watermark(Queue.PERSIST) == (3, None)


def test_quiet_counts_in_quiesce_and_its_deadline_is_the_failure() -> None:
    """Rule R3: nothing is given back before this rank's I/O touches it no more."""
    ballot = Ballot(SHAPE, 0)
    ballot.enqueue(Queue.QUIESCE, 1, OPERATION)
    assert ballot.watermark(Queue.QUIESCE) == (0, None)
    ballot.note(Ended(OPERATION, ok=True))
    assert ballot.watermark(Queue.QUIESCE) == (0, None)
    ballot.note(QuiesceExpired(OPERATION))
    assert ballot.watermark(Queue.QUIESCE) == (0, 1)
    ballot.note(Quiesced(OPERATION))
    assert ballot.watermark(Queue.QUIESCE) == (1, None)


def test_an_operation_in_quarantine_does_not_fail_again_and_ends_with_quiet() -> None:
    """Section 6: QUIESCE never expires into a free."""
    ballot = Ballot(SHAPE, 0)
    ballot.enqueue(Queue.QUIESCE, 1, OPERATION)
    ballot.note(QuiesceExpired(OPERATION))
    ballot.dequeue(Queue.QUIESCE, 1)
    ballot.enqueue(Queue.QUARANTINE, 2, OPERATION)

    assert ballot.watermark(Queue.QUIESCE) == (1, None)
    assert ballot.watermark(Queue.QUARANTINE) == (0, None)
    ballot.note(Quiesced(OPERATION))
    assert ballot.watermark(Queue.QUARANTINE) == (2, None)


def test_quiet_that_came_after_its_deadline_is_no_failure_while_others_are_waited_for() -> None:
    ballot = Ballot(SHAPE, 0)
    ballot.enqueue(Queue.QUIESCE, 1, OPERATION)
    ballot.enqueue(Queue.QUIESCE, 2, OPERATION + 1)
    ballot.note(QuiesceExpired(OPERATION + 1))
    assert ballot.watermark(Queue.QUIESCE) == (0, 2)
    ballot.note(Quiesced(OPERATION + 1))

    assert ballot.watermark(Queue.QUIESCE) == (0, None)


@pytest.mark.parametrize("queue", [Queue.QUIESCE, Queue.QUARANTINE])
def test_a_write_that_failed_does_not_fail_again_where_it_waits_for_quiet(queue: Queue) -> None:
    """Rule R3: its pages wait, and the failure was told in another queue."""
    ballot = Ballot(SHAPE, 0)
    ballot.enqueue(Queue.PERSIST, 1, OPERATION)
    ballot.note(Ended(OPERATION, ok=False))
    ballot.dequeue(Queue.PERSIST, 1)
    ballot.enqueue(queue, 2, OPERATION)

    assert ballot.watermark(queue) == (0, None)


def test_what_all_ranks_concluded_counts_although_this_rank_has_not_seen_it() -> None:
    ballot = Ballot(SHAPE, 0)
    ballot.enqueue(Queue.BACKUP, 5, OPERATION)
    ballot.dequeue(Queue.BACKUP, 5)

    assert ballot.watermark(Queue.BACKUP) == (5, None)


def operation_of(ticket: int) -> int:
    return ticket + 100


def seen_after(said: Sequence[Progress]) -> Sightings:
    ballot = Ballot(SHAPE, 0)
    ballot.expect(OPERATION)
    for progress in said:
        ballot.note(progress)
    return ballot.sightings(OPERATION)


def levels_of(ballot: Ballot) -> tuple[int | bool, ...]:
    """Return the levels of the operation, each as a number that may only grow."""
    seen = ballot.sightings(OPERATION)
    return (
        seen.answered is not None,
        seen.landed,
        -seen.ceiling,
        seen.expired,
        seen.ended is not None,
        seen.quiesced,
        seen.quiesce_expired,
    )
