"""Operation phases: the table of transitions, walked from end to end."""

from copy import deepcopy
from itertools import product

import pytest

from lockstep.coordinator.operation import FIRST_PHASE, TRANSITIONS, Kind, Phase
from lockstep.errors import InternalError
from lockstep.ranks.replica.operations import Operation, OperationTable

LEGAL = {
    (kind, phase, following)
    for kind, table in TRANSITIONS.items()
    for phase, allowed in table.items()
    for following in allowed
}
ALL = set(product(Kind, Phase, Phase))


def standing_in(kind: Kind, phase: Phase) -> tuple[OperationTable, Operation]:
    """Return a table with one operation, brought to `phase` by legal steps if there are any."""
    table = OperationTable()
    operation = Operation(table.new_id(), kind, FIRST_PHASE[kind])
    table.add(operation)
    for step in way_to(kind, phase) or ():
        table.advance(operation, step)
    operation.phase = phase
    return table, operation


def way_to(kind: Kind, phase: Phase) -> list[Phase] | None:
    """Return the shortest steps from the first phase to `phase`, or None if there are none."""
    ways: list[list[Phase]] = [[FIRST_PHASE[kind]]]
    for way in ways:
        if way[-1] is phase:
            return way[1:]
        following = sorted(TRANSITIONS[kind].get(way[-1], frozenset()))
        ways += [[*way, each] for each in following if each not in way]
    return None


@pytest.mark.parametrize(
    ("kind", "phase", "following"), sorted(LEGAL), ids=lambda value: value.name.lower()
)
def test_a_transition_of_the_table_can_be_walked(
    kind: Kind, phase: Phase, following: Phase
) -> None:
    assert way_to(kind, phase) is not None
    table, operation = standing_in(kind, phase)

    table.advance(operation, following)

    assert operation.phase is following


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_every_other_transition_raises_and_changes_nothing(kind: Kind) -> None:
    """Section 6: an operation has a phase, and outcomes fixed in advance."""
    illegal = [(phase, after) for each, phase, after in sorted(ALL - LEGAL) if each is kind]
    assert len(illegal) == len(Phase) ** 2 - len([each for each in LEGAL if each[0] is kind])
    for phase, following in illegal:
        table, operation = standing_in(kind, phase)
        before = deepcopy((operation_facts(operation), table.outcomes, list(table.in_flight)))

        with pytest.raises(InternalError, match=f"from {phase.name} to {following.name}"):
            table.advance(operation, following)

        assert (operation_facts(operation), table.outcomes, list(table.in_flight)) == before


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_every_phase_that_can_be_reached_leads_to_done(kind: Kind) -> None:
    """Section 10: every operation ends."""
    reached = {phase for phase in Phase if way_to(kind, phase) is not None}

    assert reached == TRANSITIONS[kind].keys() | {Phase.DONE}
    assert Phase.DONE not in TRANSITIONS[kind]
    for phase in reached - {Phase.DONE}:
        assert Phase.DONE in TRANSITIONS[kind][phase]


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_no_operation_walks_in_a_circle(kind: Kind) -> None:
    for phase in TRANSITIONS[kind]:
        seen: set[Phase] = set()
        ahead = set(TRANSITIONS[kind][phase])
        while ahead:
            each = ahead.pop()
            seen.add(each)
            ahead |= TRANSITIONS[kind].get(each, frozenset()) - seen
        assert phase not in seen


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_what_moves_pages_is_never_done_without_the_way_through_quiesce(kind: Kind) -> None:
    """Rule R3: QUARANTINED is entered from QUIESCE alone, and QUIESCE from what has I/O."""
    enters = {
        target: {phase for each, phase, after in LEGAL if each is kind and after is target}
        for target in (Phase.QUIESCE, Phase.QUARANTINED)
    }

    assert enters[Phase.QUARANTINED] == {Phase.QUIESCE}
    assert enters[Phase.QUIESCE] == {Phase.TRANSFER if kind is Kind.PREFETCH else Phase.ISSUED}


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_an_operation_begins_in_the_first_phase_of_its_kind(kind: Kind) -> None:
    for phase in set(Phase) - {FIRST_PHASE[kind]}:
        table = OperationTable()
        with pytest.raises(InternalError, match=f"begins in {phase.name}"):
            table.add(Operation(table.new_id(), kind, phase))
        assert not table.in_flight


def test_ids_are_never_used_again() -> None:
    """Rule R13."""
    table = OperationTable()
    ids = [table.new_id() for _ in range(100)]

    assert ids == sorted(set(ids))


def operation_facts(operation: Operation) -> tuple[object, ...]:
    return operation.id, operation.kind, operation.phase, operation.ending, operation.owns_pages
