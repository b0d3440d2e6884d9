"""A request that is silent is asked after, and is found to be there, to have left, or to be lost."""

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.disaggregation.control import Control
from lockstep.ranks.disaggregation.inquiries import ASKS_AFTER_S, ASKS_MAX, Inquiries
from lockstep.ranks.disaggregation.telling import (
    REQUESTS_ASKED_MAX,
    RequestsTold,
    RequestsWanted,
)

LATER_S = ASKS_AFTER_S + 1


class Asked:
    """What groups were asked, by group."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, RequestsWanted]] = []
        self.inquiries = Inquiries("reader", self.send)

    def send(self, group: str, message: Control) -> None:
        assert isinstance(message, RequestsWanted)
        self.messages.append((group, message))

    def requests(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(group, message.requests) for group, message in self.messages]


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_only_those_that_are_silent_are_asked_after_and_each_group_after_its_own(
    asked: Asked,
) -> None:
    asked.inquiries.heard("r", "d0", 0.0)
    asked.inquiries.heard("s", "d1", 0.0)
    asked.inquiries.heard("t", "d1", 5.0)
    asked.inquiries.heard("u", "d1", 0.0)
    asked.inquiries.end("u")

    lost = asked.inquiries.ask(LATER_S)

    assert lost == []
    assert asked.requests() == [("d0", ("r",)), ("d1", ("s",))]


def test_a_group_that_does_not_answer_is_asked_again_and_then_its_requests_are_lost(
    asked: Asked,
) -> None:
    asked.inquiries.heard("r", "d0", 0.0)

    lost = [asked.inquiries.ask(at * LATER_S) for at in range(1, ASKS_MAX + 2)]

    assert lost == [[]] * ASKS_MAX + [["r"]]
    assert len(asked.messages) == ASKS_MAX


def test_a_request_that_is_there_is_asked_after_for_as_long_as_it_is(asked: Asked) -> None:
    asked.inquiries.heard("r", "d0", 0.0)
    lost: list[str] = []
    for at in range(1, 2 * ASKS_MAX):
        lost += asked.inquiries.ask(at * LATER_S)
        asked.inquiries.hear(RequestsTold(group="d0", here=("r",)), at * LATER_S)

    assert lost == []
    assert len(asked.messages) == 2 * ASKS_MAX - 1


def test_a_group_that_knows_nothing_of_its_request_has_lost_it_and_others_cannot_say_so(
    asked: Asked,
) -> None:
    asked.inquiries.heard("r", "d0", 0.0)

    stranger = asked.inquiries.hear(RequestsTold(group="d1", unknown=("r",)), 1.0)
    of_another = asked.inquiries.hear(RequestsTold(group="d0", unknown=("s",)), 1.0)
    own = asked.inquiries.hear(RequestsTold(group="d0", unknown=("r",)), 1.0)

    assert (stranger, of_another, own) == ([], [], ["r"])


def test_no_message_asks_after_more_requests_than_may_be(asked: Asked) -> None:
    for number in range(REQUESTS_ASKED_MAX + 1):
        asked.inquiries.heard(f"r{number}", "d0", 0.0)

    asked.inquiries.ask(LATER_S)

    assert [len(requests) for _, requests in asked.requests()] == [REQUESTS_ASKED_MAX, 1]


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (("",), "request is empty"),
        (("r",) * (REQUESTS_ASKED_MAX + 1), f"number of requests is {REQUESTS_ASKED_MAX + 1}"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(requests: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RequestsWanted(reader="reader", requests=requests)
