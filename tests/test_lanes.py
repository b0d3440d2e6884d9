"""Lanes: one vector of fixed length, whose meaning the layout gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Answered, Ballot, Capped, Ended, Expired, Landed
from lockstep.coordinator.fold import disagreements, fold
from lockstep.coordinator.lanes import (
    HEADER_LANES,
    HEALTH,
    NEUTRAL,
    NO_ANSWER,
    PAIRS,
    QUEUE_LANES,
    QUEUES_AT,
    SLOT_LANES,
    SLOTS_AT,
    TIME,
    BallotShape,
    Layout,
    Slot,
    Voter,
    encode,
)
from lockstep.coordinator.operation import Phase, Queue
from lockstep.errors import InternalError

SHAPE = BallotShape(world_size=4, slots=3)
VOTER = Voter(rank=2, healthy=True, time_ms=1234)

votable = st.sampled_from([Phase.QUERY, Phase.TRANSFER])
vectors = st.lists(
    st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1), min_size=5, max_size=5
).map(lambda lanes: np.array(lanes, dtype=np.int64))


def layout(*slots: Slot, epoch: int = 1, round_: int = 1, state_digest: int = 99) -> Layout:
    return Layout(epoch=epoch, round=round_, state_digest=state_digest, slots=slots)


@given(slots=st.lists(st.builds(Slot, st.integers(1, 1 << 40), votable), max_size=3))
def test_the_vector_has_the_length_of_its_shape_whatever_is_in_it(slots: list[Slot]) -> None:
    """Rule R1: every round of an epoch has the same length."""
    vector = encode(SHAPE, layout(*slots), Ballot(), VOTER)

    assert vector.dtype == np.int64
    assert vector.shape == (SHAPE.length,) == (HEADER_LANES + QUEUE_LANES * len(Queue) + 9,)
    assert (vector[SLOTS_AT + SLOT_LANES * len(slots) :] == NEUTRAL).all()


def test_more_prefetches_than_the_shape_has_room_for_are_a_bug_that_is_named() -> None:
    slots = [Slot(number, Phase.QUERY) for number in range(4)]

    with pytest.raises(InternalError, match="4 prefetches in a ballot for 3"):
        encode(SHAPE, layout(*slots), Ballot(), VOTER)


@pytest.mark.parametrize(
    "phase", sorted(set(Phase) - {Phase.QUERY, Phase.RESTORABLE, Phase.TRANSFER})
)
def test_only_lookups_and_transfers_have_a_place_in_the_ballot(phase: Phase) -> None:
    with pytest.raises(InternalError, match=f"phase {phase.name} has no place"):
        encode(SHAPE, layout(Slot(1, phase)), Ballot(), VOTER)


def test_the_header_holds_what_must_be_equal_and_what_the_rank_says_of_itself() -> None:
    """Rule R2: each equality travels as a pair (x, -x)."""
    vector = encode(SHAPE, layout(epoch=3, round_=17, state_digest=(1 << 63) - 1), Ballot(), VOTER)

    pairs = {name: vector[at : at + 2].tolist() for name, at in PAIRS.items()}
    assert pairs["epoch"] == [3, -3]
    assert pairs["round"] == [17, -17]
    assert pairs["state digest"] == [(1 << 63) - 1, 1 - (1 << 63)]
    assert (vector[HEALTH], vector[TIME]) == (0, 1234)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_cannot_go_on_names_itself(rank: int) -> None:
    voter = Voter(rank=rank, healthy=False, time_ms=0)

    assert encode(SHAPE, layout(), Ballot(), voter)[HEALTH] == -(rank + 1)


def test_a_lookup_votes_its_answer_and_outweighs_every_answer_before_it_has_one() -> None:
    ballot = Ballot()
    ballot.expect(5)
    slot = Slot(5, Phase.QUERY)
    assert slot_lanes(ballot, slot) == [NO_ANSWER, NEUTRAL, 0]

    ballot.note(Answered(5, 11))
    ballot.note(Expired(5))
    assert slot_lanes(ballot, slot) == [11 * 4 + 2, -11, -3]


def test_a_transfer_votes_what_has_landed_and_what_it_knows_of_a_ceiling() -> None:
    ballot = Ballot()
    ballot.expect(5)
    slot = Slot(5, Phase.TRANSFER)
    assert slot_lanes(ballot, slot) == [0, NEUTRAL, 0]

    ballot.note(Landed(5, 6))
    ballot.note(Capped(5, 0))
    assert slot_lanes(ballot, slot) == [6, 2, 0]


@pytest.mark.parametrize("queue", Queue)
def test_each_queue_votes_its_watermark_in_its_own_lanes(queue: Queue) -> None:
    ballot = Ballot()
    quiet = {each: encode(SHAPE, layout(), ballot, VOTER) for each in Queue}[queue]
    ballot.settle(queue, 3)
    vector = encode(SHAPE, layout(), ballot, VOTER)

    assert np.flatnonzero(vector != quiet).tolist() == [QUEUES_AT + QUEUE_LANES * queue]
    assert vector[QUEUES_AT + QUEUE_LANES * queue] == 3


def test_a_failed_ticket_is_voted_with_the_rank_that_saw_it() -> None:
    ballot = Ballot()
    ballot.enqueue(Queue.PERSIST, 8, 80)
    ballot.note(Ended(80, ok=False))

    vector = encode(SHAPE, layout(), ballot, VOTER)

    at = QUEUES_AT + QUEUE_LANES * Queue.PERSIST
    assert vector[at : at + 2].tolist() == [0, 8 * 4 + 2]


def test_encoding_twice_gives_the_same_vector() -> None:
    """Rule R13: a ballot that was lost is repeated by the next one."""
    ballot = Ballot()
    ballot.enqueue(Queue.BACKUP, 1, 10)
    ballot.enqueue(Queue.BACKUP, 2, 20)
    ballot.note(Ended(10, ok=True))
    ballot.note(Ended(20, ok=False))

    first, second = (encode(SHAPE, layout(), ballot, VOTER) for _ in range(2))

    assert first.tolist() == second.tolist()


@given(
    slots=st.lists(
        st.lists(st.builds(Slot, st.integers(1, 1 << 40), votable), max_size=6),
        min_size=2,
        max_size=2,
        unique_by=tuple,
    )
)
def test_layouts_that_differ_have_digests_that_differ(slots: list[list[Slot]]) -> None:
    """Rule R2: the order of the slots is part of what the lanes mean."""
    digests = {layout(*each).digest for each in slots}

    assert len(digests) == 2
    assert all(0 <= digest < 1 << 63 for digest in digests)


@given(ballots=st.lists(vectors, min_size=1, max_size=5), data=st.data())
def test_the_order_and_the_grouping_of_the_ranks_do_not_matter(
    ballots: list[np.ndarray], data: st.DataObject
) -> None:
    """Section 7: a hierarchical transport folds in another order and gets the same vector."""
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
    """Rule R2, over the whole range of a digest: no sum overflows into an agreement."""
    ballots = [np.zeros(HEADER_LANES, dtype=np.int64) for _ in values]
    for ballot, value in zip(ballots, values, strict=True):
        ballot[PAIRS[name] : PAIRS[name] + 2] = value, -value

    assert disagreements(fold(ballots)) == (() if len(set(values)) == 1 else (name,))


def slot_lanes(ballot: Ballot, slot: Slot) -> list[int]:
    vector = encode(SHAPE, layout(slot), ballot, VOTER)
    lanes: list[int] = vector[SLOTS_AT : SLOTS_AT + SLOT_LANES].tolist()
    return lanes
