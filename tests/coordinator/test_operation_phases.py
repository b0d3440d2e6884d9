"""Operation phases: the table of transitions, walked from the first phase to DONE."""

from itertools import product

import pytest

from lockstep.coordinator.operation import (
    FIRST_PHASE,
    TRANSITIONS,
    OperationKind,
    Phase,
    require_step,
)
from lockstep.errors import InternalError

LEGAL = {
    (kind, phase, following)
    for kind, table in TRANSITIONS.items()
    for phase, allowed in table.items()
    for following in allowed
}
ALL = set(product(OperationKind, Phase, Phase))


def way_to(kind: OperationKind, phase: Phase) -> list[Phase] | None:
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
    kind: OperationKind, phase: Phase, following: Phase
) -> None:
    assert way_to(kind, phase) is not None
    require_step(1, kind, phase, following)


@pytest.mark.parametrize("kind", OperationKind, ids=lambda kind: kind.name.lower())
def test_every_other_transition_raises(kind: OperationKind) -> None:
    illegal = [(phase, after) for each, phase, after in sorted(ALL - LEGAL) if each is kind]
    assert len(illegal) == len(Phase) ** 2 - len([each for each in LEGAL if each[0] is kind])
    for phase, following in illegal:
        with pytest.raises(InternalError, match=f"from {phase.name} to {following.name}"):
            require_step(1, kind, phase, following)


@pytest.mark.parametrize("kind", OperationKind, ids=lambda kind: kind.name.lower())
def test_every_phase_that_can_be_reached_leads_to_done(kind: OperationKind) -> None:
    reached = {phase for phase in Phase if way_to(kind, phase) is not None}

    assert reached == TRANSITIONS[kind].keys() | {Phase.DONE}
    assert Phase.DONE not in TRANSITIONS[kind]
    stuck = [phase for phase in TRANSITIONS[kind] if Phase.DONE not in ahead_of(kind, phase)]
    assert stuck == []


@pytest.mark.parametrize("kind", OperationKind, ids=lambda kind: kind.name.lower())
def test_no_operation_walks_in_a_circle(kind: OperationKind) -> None:
    assert [phase for phase in TRANSITIONS[kind] if phase in ahead_of(kind, phase)] == []


def ahead_of(kind: OperationKind, phase: Phase) -> set[Phase]:
    seen: set[Phase] = set()
    ahead = set(TRANSITIONS[kind][phase])
    while ahead:
        each = ahead.pop()
        seen.add(each)
        ahead |= TRANSITIONS[kind].get(each, frozenset()) - seen
    return seen


@pytest.mark.parametrize("kind", OperationKind, ids=lambda kind: kind.name.lower())
def test_what_moves_pages_is_never_done_without_the_way_through_quiesce(
    kind: OperationKind,
) -> None:
    """Rule R3: QUARANTINED is entered only from QUIESCE, and QUIESCE only from phases with I/O."""
    enters = {
        target: {phase for each, phase, after in LEGAL if each is kind and after is target}
        for target in (Phase.QUIESCE, Phase.QUARANTINED)
    }

    assert enters[Phase.QUARANTINED] == {Phase.QUIESCE}
    has_io = {OperationKind.PREFETCH: Phase.TRANSFER, OperationKind.SERVE: Phase.SERVING}
    assert enters[Phase.QUIESCE] == {has_io.get(kind, Phase.ISSUED)}
