"""Lanes: one vector of fixed length, whose meaning is defined by the layout."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Ballot, Landed
from lockstep.coordinator.lanes import (
    HEADER_LANES,
    HEALTH,
    NEUTRAL,
    NEWEST,
    PAIRS,
    PROPOSAL,
    QUEUE_LANES,
    READINESS,
    REQUESTS,
    SLOT_LANES,
    SLOTS_AT,
    TIME,
    BallotShape,
    LaneLayout,
    Voter,
    disagreements,
    fold,
    read_header,
)
from lockstep.coordinator.operation import Phase, Queue
from lockstep.coordinator.prefetch_slots import PrefetchSlots, PrefetchSlotTable
from lockstep.coordinator.proposal import Readiness, StagedLanes
from lockstep.errors import InternalError

SHAPE = BallotShape(world_size=4, prefetch_slots=3)
RANK = 2
VOTER = Voter(healthy=True, time_ms=1234)
NO_SEATS = PrefetchSlots(SHAPE.prefetch_slots).freeze()

votable = st.sampled_from([Phase.QUERY, Phase.RESTORABLE, Phase.TRANSFER])
vectors = st.lists(
    st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1), min_size=5, max_size=5
).map(lambda lanes: np.array(lanes, dtype=np.int64))


def layout(
    prefetch_slots: PrefetchSlotTable = NO_SEATS, *, epoch: int = 1, state_digest: int = 99
) -> LaneLayout:
    return LaneLayout(
        epoch=epoch, round=17, state_digest=state_digest, prefetch_slots=prefetch_slots
    )


@given(phases=st.lists(votable, max_size=3), left=st.sets(st.integers(0, 2)))
def test_the_vector_has_the_length_of_its_shape_whatever_is_in_it(
    phases: list[Phase], left: set[int]
) -> None:
    """Rule R1: every round of an epoch has the same length; lanes of a free slot are neutral."""
    ballot = Ballot(SHAPE, RANK)
    for prefetch_slot, phase in enumerate(phases):
        ballot.assign_slot(100 + prefetch_slot, prefetch_slot, phase)
    for prefetch_slot in left:
        ballot.free_slot(100 + prefetch_slot)
    vector = ballot.fill(layout(), VOTER)

    assert vector.dtype == np.int64
    assert vector.shape == (SHAPE.length,) == (HEADER_LANES + QUEUE_LANES * len(Queue) + 9,)
    lanes = vector[SLOTS_AT:].reshape(SHAPE.prefetch_slots, SLOT_LANES)
    free = (lanes == NEUTRAL).all(axis=1).nonzero()[0].tolist()
    assert set(free) == set(range(3)) - (set(range(len(phases))) - left)


@pytest.mark.parametrize("prefetch_slot", [-1, 3])
def test_a_prefetch_slot_that_the_shape_has_no_room_for_is_a_bug_that_is_named(
    prefetch_slot: int,
) -> None:
    with pytest.raises(InternalError, match=f"prefetch slot is {prefetch_slot}, must be 0 to 2"):
        Ballot(SHAPE, RANK).assign_slot(1, prefetch_slot, Phase.QUERY)


@pytest.mark.parametrize(
    "phase", sorted(set(Phase) - {Phase.QUERY, Phase.RESTORABLE, Phase.TRANSFER})
)
def test_only_lookups_and_transfers_have_a_place_in_the_ballot(phase: Phase) -> None:
    with pytest.raises(InternalError, match=f"phase {phase.name} has no prefetch slot"):
        Ballot(SHAPE, RANK).assign_slot(1, 0, phase)


def test_the_header_holds_what_must_be_equal_and_what_the_rank_says_of_itself() -> None:
    """Rule R2: a value x that must be equal on every rank takes two lanes, x and -x."""
    prefetch_slots = PrefetchSlots(SHAPE.prefetch_slots)
    prefetch_slots.take(1, Phase.QUERY)
    header = layout(prefetch_slots.freeze(), epoch=3, state_digest=(1 << 63) - 1)
    vector = Ballot(SHAPE, RANK).fill(header, VOTER)

    pairs = {name: vector[at : at + 2].tolist() for name, at in PAIRS.items()}
    assert pairs["epoch"] == [3, -3]
    assert pairs["round"] == [17, -17]
    digest = prefetch_slots.freeze().digest
    assert pairs["layout digest"] == [digest, -digest]
    assert pairs["state digest"] == [(1 << 63) - 1, 1 - (1 << 63)]
    assert (vector[HEALTH], vector[TIME]) == (0, 1234)


@pytest.mark.parametrize(
    ("voter", "lanes"),
    [
        (msgspec.structs.replace(VOTER, requests=9), [REQUESTS]),
        (msgspec.structs.replace(VOTER, newest=9), [NEWEST]),
        (
            msgspec.structs.replace(VOTER, staged=StagedLanes((1 << 62) + 1, Readiness.READY)),
            [PROPOSAL, PROPOSAL + 1, READINESS],
        ),
    ],
    ids=["requests", "newest", "proposal"],
)
def test_what_a_rank_has_of_requests_and_proposals_takes_no_lane_but_its_own_in_the_header(
    voter: Voter, lanes: list[int]
) -> None:
    without, having = (Ballot(SHAPE, RANK).fill(layout(), each) for each in (VOTER, voter))

    assert without.shape == having.shape
    assert np.flatnonzero(without != having).tolist() == lanes
    assert lanes[-1] < HEADER_LANES


def test_a_vector_that_was_given_away_is_not_written_again() -> None:
    """A vector must not change after launch, because the transport may still be reading it."""
    ballot = Ballot(SHAPE, RANK)
    ballot.assign_slot(5, 0, Phase.TRANSFER)
    first = ballot.fill(layout(), VOTER)
    before = first.tolist()
    ballot.note(Landed(5, 3))
    ballot.dequeue(Queue.BACKUP, 4)
    second = ballot.fill(layout(epoch=2), VOTER)

    assert first.tolist() == before != second.tolist()
    first[:] = 0
    assert ballot.fill(layout(epoch=2), VOTER).tolist() == second.tolist()


@given(ballots=st.lists(vectors, min_size=1, max_size=5), data=st.data())
def test_the_order_and_the_grouping_of_the_ranks_do_not_matter(
    ballots: list[np.ndarray], data: st.DataObject
) -> None:
    """Section 7: a hierarchical transport folds in a different order and gets the same vector."""
    whole = fold(ballots).tolist()
    shuffled = data.draw(st.permutations(ballots))
    cut = data.draw(st.integers(1, len(ballots)))
    groups = [group for group in (shuffled[:cut], shuffled[cut:]) if group]

    assert fold(shuffled).tolist() == whole
    assert fold([fold(group) for group in groups]).tolist() == whole
    assert fold([*ballots, ballots[0]]).tolist() == whole


@given(
    values=st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=5),
    name=st.sampled_from(sorted(PAIRS)),
)
def test_a_pair_folds_to_an_equality_check(values: list[int], name: str) -> None:
    """Rule R2: over the whole range of a digest, no overflow makes different digests look equal."""
    ballots = [np.zeros(HEADER_LANES, dtype=np.int64) for _ in values]
    for ballot, value in zip(ballots, values, strict=True):
        ballot[PAIRS[name] : PAIRS[name] + 2] = value, -value

    assert disagreements(read_header(fold(ballots).data)) == (
        () if len(set(values)) == 1 else (name,)
    )
