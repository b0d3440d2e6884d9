"""Which chunks are in the store: asked once, remembered for who asked, and never waited for."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from lockstep.errors import StorageError
from lockstep.integrations.vllm.tier import lookups
from lockstep.integrations.vllm.tier.lookups import LATE_S, MISSING_S, SILENT_S, Lookups

ONE, TWO, THREE = b"one", b"two", b"three"


@dataclass
class Asked:
    """A store that is asked, a clock, and what was complained of."""

    now: float = 100.0
    is_closed: bool = False
    calls: list[tuple[list[bytes], float]] = field(default_factory=list[tuple[list[bytes], float]])
    answers: list["Future[list[bool]]"] = field(default_factory=list["Future[list[bool]]"])
    troubles: list[str] = field(default_factory=list[str])

    def ask(self, keys: Sequence[bytes], by: float) -> "Future[list[bool]]":
        if self.is_closed:
            raise StorageError("closed")
        self.calls.append(([*keys], by))
        self.answers.append(Future())
        return self.answers[-1]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def known(asked: Asked) -> Lookups:
    return Lookups(asked.ask, 2.0, trouble=asked.troubles.append, clock=lambda: asked.now)


def test_nothing_is_known_of_a_new_chunk_and_nothing_asked_before_the_step_ends(
    asked: Asked, known: Lookups
) -> None:
    assert known.find(ONE, "a") is None
    assert asked.calls == []


def test_the_chunks_of_a_step_are_asked_for_at_once_and_each_only_once(
    asked: Asked, known: Lookups
) -> None:
    found = [known.find(each, who) for each, who in [(ONE, "a"), (TWO, "a"), (ONE, "b")]]
    known.flush()
    known.flush()

    assert found == [None] * 3
    assert asked.calls == [([ONE, TWO], 102.0)]


def test_an_answer_is_there_as_soon_as_the_store_has_given_it(asked: Asked, known: Lookups) -> None:
    known.find(ONE, "a")
    known.find(TWO, "a")
    known.flush()
    before = known.find(ONE, "a")
    asked.answers[0].set_result([True, False])

    assert before is None
    assert [known.find(ONE, "a"), known.find(TWO, "a")] == [True, False]


def test_a_later_step_asks_only_for_what_is_new_in_it(asked: Asked, known: Lookups) -> None:
    known.find(ONE, "a")
    known.flush()
    known.find(TWO, "a")
    known.flush()
    asked.answers[1].set_result([True])

    assert [keys for keys, _ in asked.calls] == [[ONE], [TWO]]
    assert [known.find(ONE, "a"), known.find(TWO, "a")] == [None, True]


def test_a_step_without_new_chunks_asks_nothing(asked: Asked, known: Lookups) -> None:
    known.flush()

    assert asked.calls == []


def test_what_the_last_request_asked_for_is_forgotten_with_it(asked: Asked, known: Lookups) -> None:
    known.find(ONE, "a")
    known.find(ONE, "b")
    known.flush()
    asked.answers[0].set_result([True])
    known.find(ONE, "a")

    known.finished("a")
    with_one_left = len(known)
    known.finished("b")

    assert (with_one_left, len(known)) == (1, 0)


def test_a_request_that_nobody_knows_can_be_over(known: Lookups) -> None:
    known.find(ONE, "a")
    known.finished("another")

    assert len(known) == 1


def test_a_lookup_on_its_way_serves_the_next_request_when_its_own_is_over(
    asked: Asked, known: Lookups
) -> None:
    known.find(ONE, "a")
    known.flush()
    known.finished("a")
    found = known.find(ONE, "b")
    known.flush()
    asked.answers[0].set_result([True])

    assert found is None
    assert known.find(ONE, "b")
    assert len(asked.calls) == 1


def test_an_answer_that_nobody_waits_for_leaves_nothing_behind(
    asked: Asked, known: Lookups
) -> None:
    known.find(ONE, "a")
    known.flush()
    known.finished("a")
    asked.answers[0].set_result([True])
    known.flush()

    assert len(known) == 0


def test_a_request_that_is_over_before_its_step_ends_asks_nothing(
    asked: Asked, known: Lookups
) -> None:
    known.find(ONE, "a")
    known.finished("a")
    known.flush()

    assert asked.calls == []


def test_a_request_that_asks_again_in_the_same_step_is_answered(
    asked: Asked, known: Lookups
) -> None:
    known.find(ONE, "a")
    known.finished("a")
    known.find(ONE, "b")
    known.flush()
    asked.answers[0].set_result([True])

    assert asked.calls[0][0] == [ONE]
    assert known.find(ONE, "b")


def test_a_chunk_that_could_not_be_read_is_a_miss_at_once_for_all_requests(
    asked: Asked, known: Lookups
) -> None:
    known.find(ONE, "a")
    known.flush()
    asked.answers[0].set_result([True])
    before = known.find(ONE, "a")

    known.lost([ONE])

    assert before
    assert [known.find(ONE, "a"), known.find(ONE, "b")] == [False, False]
    assert len(asked.calls) == 1


def test_an_answer_that_comes_after_the_read_has_failed_changes_nothing(
    asked: Asked, known: Lookups
) -> None:
    known.find(ONE, "a")
    known.flush()
    known.lost([ONE])
    asked.answers[0].set_result([True])

    assert known.find(ONE, "a") is False


def test_a_chunk_that_was_lost_is_looked_for_again_after_a_while(
    asked: Asked, known: Lookups
) -> None:
    known.lost([ONE])
    soon = known.find(ONE, "a")
    known.finished("a")
    asked.now += MISSING_S

    later = known.find(ONE, "b")
    known.flush()

    assert (soon, later) == (False, None)
    assert [keys for keys, _ in asked.calls] == [[ONE]]


def test_a_chunk_that_was_stored_again_is_found_by_all_who_missed_it(
    asked: Asked, known: Lookups
) -> None:
    known.lost([ONE, TWO])
    missed = known.find(ONE, "a")
    known.stored([ONE, TWO])

    assert missed is False
    assert [known.find(ONE, "a"), known.find(ONE, "b"), known.find(TWO, "a")] == [True, True, None]


def test_what_is_stored_while_it_is_looked_for_is_there(asked: Asked, known: Lookups) -> None:
    known.find(ONE, "a")
    known.flush()
    known.stored([ONE])
    asked.answers[0].set_result([False])

    assert known.find(ONE, "a") is True


def test_lost_chunks_are_remembered_up_to_a_bound_the_oldest_first(
    known: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MISSING_MAX", 2)

    known.lost([ONE, TWO, THREE])

    assert [known.find(each, "a") for each in (ONE, TWO, THREE)] == [None, False, False]


def test_a_store_that_fails_has_nothing_and_that_is_said(asked: Asked, known: Lookups) -> None:
    known.find(ONE, "a")
    known.flush()
    asked.answers[0].set_exception(StorageError("gone"))

    assert known.find(ONE, "a") is False
    assert asked.troubles == ["StorageError('gone')"]


def test_a_store_that_cannot_be_asked_has_nothing(asked: Asked, known: Lookups) -> None:
    asked.is_closed = True
    known.find(ONE, "a")
    known.flush()

    assert known.find(ONE, "a") is False
    assert asked.troubles == ["StorageError('closed')"]


def test_a_store_that_does_not_answer_is_left_after_its_deadline(
    asked: Asked, known: Lookups
) -> None:
    known.find(ONE, "a")
    known.flush()
    asked.now += 2.0
    in_time = known.find(ONE, "a")
    asked.now += LATE_S

    assert in_time is None
    assert known.find(ONE, "a") is False
    assert asked.answers[0].cancelled()
    assert asked.troubles == ["no answer in time"]


def test_a_store_that_did_not_answer_is_not_asked_for_a_while(asked: Asked, known: Lookups) -> None:
    known.find(ONE, "a")
    known.flush()
    asked.now += 2.0 + LATE_S
    known.flush()
    known.find(TWO, "a")
    known.flush()
    meanwhile = known.find(TWO, "a")
    asked.now += SILENT_S
    known.find(THREE, "a")
    known.flush()

    assert meanwhile is False
    assert [keys for keys, _ in asked.calls] == [[ONE], [THREE]]


def test_a_lookup_that_was_given_up_with_the_store_is_a_miss(asked: Asked, known: Lookups) -> None:
    known.find(ONE, "a")
    known.flush()
    asked.answers[0].cancel()

    assert known.find(ONE, "a") is False
