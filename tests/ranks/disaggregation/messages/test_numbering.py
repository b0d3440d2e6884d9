"""Numbers: each message gets one; what waits and what is remembered are bounded (rule R10)."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.ranks.disaggregation.messages.numbering import (
    SENDER_BYTES,
    SEQUENCE_SPAN,
    InboxBounds,
    Numbering,
)
from lockstep.ranks.disaggregation.refusal import Refusal, Refused
from lockstep.ranks.messages import Backlog

FIRST, SECOND, THIRD = (bytes([each]) * SENDER_BYTES for each in (1, 2, 3))


def numbering(**bounds: int) -> tuple[Numbering, Backlog]:
    backlog = Backlog()
    return Numbering(InboxBounds(**bounds), backlog, [1, 2]), backlog


@given(st.lists(st.tuples(st.sampled_from([FIRST, SECOND]), st.integers(1, 9)), max_size=60))
def test_each_message_has_one_number_in_any_order_of_arrivals(
    arrivals: list[tuple[bytes, int]],
) -> None:
    """Rule R13."""
    numbers, backlog = numbering()

    got = [numbers.take(sender, sequence, b"") for sender, sequence in arrivals]

    first_seen = list(dict.fromkeys(arrivals))
    assert got == [first_seen.index(each) + 1 for each in arrivals]
    assert backlog.count == len(first_seen)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=30))
def test_what_every_rank_has_and_the_engine_has_taken_makes_room_and_nothing_else_does(
    said: list[tuple[int, int]],
) -> None:
    numbers, backlog = numbering(messages_waiting=5)
    for sequence in range(1, 6):
        numbers.take(FIRST, sequence, b"m")
    ways: list[Callable[[int], None]] = [
        backlog.let_go,
        partial(numbers.reach, 1),
        partial(numbers.reach, 2),
    ]
    reached = [0, 0, 0]
    for rank, had in said:
        ways[rank](had)
        reached[rank] = max(reached[rank], min(had, 5))

    assert room(numbers) == min(reached)


def room(numbers: Numbering) -> int:
    """Return how many more messages are taken."""
    for taken in range(100):
        try:
            numbers.take(SECOND, taken + 1, b"m")
        except Refused as refused:
            return taken if refused.refusal is Refusal.FULL else -1
    return 100


def test_a_sender_that_was_silent_for_the_longest_is_forgotten_first() -> None:
    numbers, _ = numbering(senders=2)
    for sender in (FIRST, SECOND, FIRST, THIRD):
        numbers.take(sender, 2, b"m")

    assert [numbers.take(sender, 2, b"m") for sender in (FIRST, THIRD, SECOND)] == [1, 3, 4]


def test_a_sender_that_repeats_itself_is_not_silent() -> None:
    numbers, _ = numbering(senders=2)
    numbers.take(FIRST, 1, b"m")
    numbers.take(SECOND, 1, b"m")
    numbers.take(FIRST, 1, b"m")
    numbers.take(THIRD, 1, b"m")

    assert numbers.take(FIRST, 1, b"m") == 1


def test_what_is_remembered_of_a_sender_has_a_span() -> None:
    numbers, _ = numbering()
    numbers.take(FIRST, 1, b"m")
    last = numbers.take(FIRST, SEQUENCE_SPAN, b"m")
    assert numbers.take(FIRST, 1, b"m") == 1
    numbers.take(FIRST, SEQUENCE_SPAN + 1, b"m")

    with pytest.raises(Refused, match="nobody knows any more whether it came before"):
        numbers.take(FIRST, 1, b"m")
    assert numbers.take(FIRST, SEQUENCE_SPAN, b"m") == last


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"senders": 0}, "senders of an inbox is 0"),
        ({"connections": 1 << 31}, "connections of an inbox is"),
        ({"bytes_waiting": 10, "message_bytes": 11}, "less than one message of 11"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(bounds: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        InboxBounds(**bounds)
