"""Requests go where the router says, are followed, and are found again when a group is lost."""

import numpy as np
import pytest

from lockstep.ranks.disaggregation.dispatcher import TOKENS_PER_S_GUESS, Dispatcher, Terms
from lockstep.ranks.disaggregation.groups.directory import Member, Registration
from lockstep.ranks.disaggregation.groups.kv_events import BlockStored as StoredEvent
from lockstep.ranks.disaggregation.groups.kv_events import EventBatch
from lockstep.ranks.disaggregation.groups.prefix_index import PrefixIndex
from lockstep.ranks.disaggregation.groups.router import Choice, Refusal, Role
from lockstep.ranks.disaggregation.telling import Milestone, Progress
from lockstep.ranks.replica.notices import Tier
from lockstep.ranks.replica.tree.page_keys import namespace_seed, page_keys
from lockstep.ranks.replica.tree.tokens import as_token_bytes

TERMS = Terms(model_digest=b"m" * 32, page_tokens=4, tokens_max=100)
TOKENS = np.arange(40, dtype=np.int32)
SECOND_US = 1_000_000


def member(name: str, role: Role) -> Member:
    return Member(Registration(name=name, role=role, addresses={"messages": f"at {name}"}), 1)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def dispatcher(index: PrefixIndex) -> Dispatcher:
    dispatcher = Dispatcher(TERMS, index)
    for name in ("p0", "p1"):
        dispatcher.join(member(name, Role.PREFILL))
    for name in ("d0", "d1"):
        dispatcher.join(member(name, Role.DECODE))
    return dispatcher


def choose(dispatcher: Dispatcher, tokens: int = 40) -> Choice:
    choice = dispatcher.choose(TOKENS[:tokens], 4)
    assert isinstance(choice, Choice)
    return choice


def begin(dispatcher: Dispatcher, request: str) -> Choice:
    choice = choose(dispatcher)
    dispatcher.begin(request, 40, 4, choice, 0)
    return choice


def told(
    group: str, request: str, stage: Milestone, *, at_us: int = 0, computed: int = 0
) -> Progress:
    return Progress(
        group=group, request=request, stage=stage.value, at_us=at_us, computed_tokens=computed
    )


def test_a_request_goes_to_the_group_that_has_its_prefix(
    dispatcher: Dispatcher, index: PrefixIndex
) -> None:
    keys = tuple(page_keys(namespace_seed(TERMS.model_digest, ""), as_token_bytes(TOKENS), 4))
    stored = StoredEvent(Tier.HOST, keys)
    index.apply("p1", EventBatch(life=1, sequence=0, time_s=0, events=(stored,)))

    choice = choose(dispatcher)

    assert (choice.prefill, choice.hit_tokens) == ("p1", 39)


def test_requests_are_spread_over_groups_that_have_nothing(dispatcher: Dispatcher) -> None:
    chosen = [begin(dispatcher, f"r{number}") for number in range(4)]

    assert [each.prefill for each in chosen] == ["p0", "p1", "p0", "p1"]
    assert [each.decode for each in chosen] == ["d0", "d1", "d0", "d1"]
    assert len(dispatcher) == 4


def test_a_group_that_is_full_gets_no_more_until_a_request_has_left(dispatcher: Dispatcher) -> None:
    for number in range(4):
        begin(dispatcher, f"r{number}")
    assert dispatcher.choose(TOKENS, 4) is Refusal.NO_ROOM

    dispatcher.hear(told("d0", "r0", Milestone.DONE))

    assert "r0" not in dispatcher
    assert choose(dispatcher).decode == "d0"


def test_what_no_group_could_hold_is_refused(dispatcher: Dispatcher) -> None:
    assert dispatcher.choose(np.arange(99, dtype=np.int32), 2) is Refusal.TOO_LONG


def test_how_fast_a_group_computes_is_learnt_from_what_it_tells(dispatcher: Dispatcher) -> None:
    begin(dispatcher, "r0")

    dispatcher.hear(told("p0", "r0", Milestone.COMPUTED, at_us=SECOND_US, computed=100))
    choice = choose(dispatcher)

    assert choice.prefill == "p1"
    assert choice.compute_s == pytest.approx(40 / TOKENS_PER_S_GUESS)


def test_a_group_that_computed_waits_for_nobody_any_more(dispatcher: Dispatcher) -> None:
    begin(dispatcher, "r0")
    begin(dispatcher, "r1")

    dispatcher.hear(told("p1", "r1", Milestone.COMPUTED))

    assert choose(dispatcher).prefill == "p1"


def test_where_no_group_prefills_the_one_that_decodes_does_all(dispatcher: Dispatcher) -> None:
    dispatcher.lose("p0")
    dispatcher.lose("p1")

    choice = choose(dispatcher)
    begun = dispatcher.begin("r", 40, 4, choice, 0)

    assert (begun.prefill, begun.decode) == ("", "d0")


def test_without_a_group_that_decodes_nothing_can_be_served(dispatcher: Dispatcher) -> None:
    dispatcher.lose("d0")
    dispatcher.lose("d1")

    assert dispatcher.choose(TOKENS, 4) is Refusal.NO_DECODE_GROUP


def test_a_lost_group_had_what_it_computes_and_what_it_decodes(dispatcher: Dispatcher) -> None:
    for name in ("r0", "r1", "r2"):
        begin(dispatcher, name)
    dispatcher.hear(told("p0", "r0", Milestone.COMPUTED))
    dispatcher.hear(told("d0", "r0", Milestone.READY))

    assert [each.request for each in dispatcher.lose("p0")] == ["r2"]
    assert [each.request for each in dispatcher.lose("d0")] == ["r0", "r2"]
    assert dispatcher.member("p0") is None


def test_a_lost_group_had_what_it_computed_until_the_other_has_it(dispatcher: Dispatcher) -> None:
    begin(dispatcher, "r0")
    dispatcher.hear(told("p0", "r0", Milestone.COMPUTED))

    assert [each.request for each in dispatcher.lose("p0")] == ["r0"]
    dispatcher.computes_here("r0", "d0")
    assert choose(dispatcher).decode == "d1"
    dispatcher.hear(told("d0", "r0", Milestone.COMPUTED))
    assert dispatcher.lose("p0") == []


def test_what_strangers_tell_of_a_request_changes_nothing(dispatcher: Dispatcher) -> None:
    begin(dispatcher, "r0")

    assert dispatcher.hear(told("d1", "r0", Milestone.DONE)) is None
    assert dispatcher.hear(told("d0", "unknown", Milestone.DONE)) is None
    assert "r0" in dispatcher
