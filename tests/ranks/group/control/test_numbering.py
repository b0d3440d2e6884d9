"""Numbers: what waits is bounded (rule R10)."""

from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import MessageError
from lockstep.ranks.group.control.numbering import InboxBounds, Numbering
from lockstep.ranks.group.member.messages import Backlog


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=30))
def test_what_every_rank_has_and_the_engine_has_taken_makes_room_and_nothing_else_does(
    said: list[tuple[int, int]],
) -> None:
    backlog = Backlog()
    numbers = Numbering(InboxBounds(messages_waiting=5), backlog, [1, 2])
    assert [numbers.take(b"m") for _ in range(5)] == [1, 2, 3, 4, 5]
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
            numbers.take(b"m")
        except MessageError:
            return taken
    return 100
