"""A request's stages change only by the transition table."""

from itertools import product

import pytest

from lockstep.errors import InternalError
from lockstep.ranks.replica.operations.requests import (
    STAGES,
    Request,
    RequestEvent,
    Requests,
    Stage,
)
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, RanksInTurn


def requests() -> tuple[Requests, Request]:
    known = RanksInTurn(1, store=False).caches[0].inspection.requests
    return known, known.enter("r", "")


@pytest.mark.parametrize(("event", "stage"), STAGES, ids=lambda each: each.name)
def test_an_event_moves_a_request_as_the_table_says(event: RequestEvent, stage: Stage) -> None:
    known, request = requests()
    request.stage = stage

    known.move(request, event)

    assert request.stage is STAGES[event, stage]


@pytest.mark.parametrize(
    ("event", "stage"),
    [each for each in product(RequestEvent, Stage) if each not in STAGES],
    ids=lambda each: each.name,
)
def test_an_event_that_the_table_does_not_have_is_a_bug_of_ours(
    event: RequestEvent, stage: Stage
) -> None:
    known, request = requests()
    request.stage = stage

    with pytest.raises(InternalError, match=f"cannot {event.name} while it is {stage.name}"):
        known.move(request, event)
    assert request.stage is stage


def test_every_stage_is_reached_from_known_and_left_again() -> None:
    reached = {Stage.KNOWN}
    for _ in Stage:
        reached |= {after for (_, before), after in STAGES.items() if before in reached}

    assert reached == set(Stage)
    assert {before for _, before in STAGES} == set(Stage)


def test_every_event_moves_something() -> None:
    assert {event for event, _ in STAGES} == set(RequestEvent)


@pytest.mark.parametrize("stage", Stage, ids=lambda each: each.name)
def test_what_an_engine_is_told_follows_from_the_stage_alone(stage: Stage) -> None:
    _, request = requests()
    request.stage = stage

    assert (request.load_state is None) == (stage is Stage.KNOWN)
    assert request.admitted == (stage not in {Stage.KNOWN, Stage.FAILED})


def test_a_request_whose_device_is_the_replicas_goes_there_and_back() -> None:
    ranks = RanksInTurn(2, store=False)
    tokens = list(range(2 * PAGE_TOKENS + 1))

    def stage() -> Stage:
        return ranks.every(lambda cache: cache.inspection.requests.known("r").stage)

    ranks.every(lambda cache: cache.load_back("r", [], reserve_tokens=len(tokens)))
    assert stage() is Stage.READY
    ranks.every(lambda cache: cache.retract("r", tokens))
    assert stage() is Stage.SAVING
    ranks.settle()
    assert stage() is Stage.SAVED
    ranks.every(lambda cache: cache.resume("r"))
    assert stage() is Stage.LOADING
    ranks.settle()
    assert stage() is Stage.READY


def test_a_request_whose_engine_lends_pages_is_barred_from_loads_once_one_has_failed() -> None:
    ranks = HostRanksInTurn(2, store=False)
    tokens = list(range(2 * PAGE_TOKENS))

    def stage() -> Stage:
        return ranks.every(lambda cache: cache.inspection.requests.known("r").stage)

    ranks.every(lambda cache: cache.back_up("w", tokens, [0, 1]))
    ranks.settle()
    ranks.every(lambda cache: cache.match_host("r", tokens))
    assert stage() is Stage.KNOWN
    ranks.every(lambda cache: cache.load("r", tokens, [2, 3]))
    assert stage() is Stage.LOADING
    ranks.executors[1].fail()
    ranks.complete()
    assert stage() is Stage.STOPPING
    ranks.settle()
    assert stage() is Stage.BARRED
    assert ranks.every(lambda cache: cache.match_host("r", tokens)) == 0
    ranks.every(lambda cache: cache.fence("r"))
    assert stage() is Stage.FAILED
    ranks.every(lambda cache: cache.back_up("r", tokens, [4, 5]))
    assert stage() is Stage.BARRED
