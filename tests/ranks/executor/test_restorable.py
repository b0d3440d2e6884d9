"""Restorable lengths: the fast algorithm gives the same result as a check of every length."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Answered
from lockstep.ranks.executor.restorable import restorable
from lockstep.ranks.protocol.orders import KV_POOL, LookUp, Need

Present = Sequence[Sequence[bool]]
PAGES_MAX = 12


@st.composite
def needs(draw: st.DrawFn, pool: str, floor: int, span: int | None) -> Need:
    """Draw a pool's need that starts near the floor.

    Some of its keys are empty, and some of its pages may be in host memory.
    """
    keys = draw(st.lists(st.sampled_from([b"", b"key", b"key", b"key"]), max_size=PAGES_MAX))
    lowest = 0 if span is not None else floor
    first = draw(st.integers(min_value=lowest, max_value=floor + 2))
    held = draw(st.frozensets(st.integers(min_value=0, max_value=floor + PAGES_MAX)))
    return Need(pool, first, tuple(keys), span, frozenset() if span is None else held)


@st.composite
def lookups(draw: st.DrawFn) -> tuple[LookUp, Present]:
    """Draw a lookup, and the store's answers for each of its needs; the last answers may be missing."""
    floor = draw(st.integers(min_value=0, max_value=4))
    spans = draw(st.lists(st.integers(min_value=1, max_value=5), max_size=2))
    all_needs = [draw(needs(KV_POOL, floor, None))]
    all_needs += [draw(needs(f"p{at}", floor, span)) for at, span in enumerate(spans)]
    present = [
        draw(st.lists(st.sampled_from([True, True, False]), max_size=len(need.keys)))
        for need in all_needs
    ]
    return LookUp(1, floor, tuple(all_needs), 1.0), present


def there(need: Need, has: Sequence[bool], position: int) -> bool:
    """Return whether one page of one pool is in the store or in host memory."""
    found = {need.first + index: each for index, each in enumerate(has)}
    named = {need.first + index: key for index, key in enumerate(need.keys)}
    return position in need.on_host or bool(found.get(position) and named.get(position))


def can_end(order: LookUp, present: Present, end: int) -> bool:
    full = order.needs[0]
    if end > full.first + len(full.keys):
        return False
    required = [
        (need, has, position)
        for need, has in zip(order.needs, present, strict=True)
        for position in range(full.first if need.span is None else max(0, end - need.span), end)
    ]
    return all(there(need, has, position) for need, has, position in required)


def lengths(answer: tuple[int, tuple[int, ...]]) -> list[int]:
    pages, beyond = answer
    return [*range(1, pages + 1), *beyond]


@given(lookups())
def test_the_restorable_lengths_are_those_for_which_every_pool_has_what_they_need(
    drawn: tuple[LookUp, Present],
) -> None:
    order, present = drawn
    ends = range(order.floor + 1, order.floor + 3 * PAGES_MAX)

    answer = restorable(order, present)

    expected = [end - order.floor for end in ends if can_end(order, present, end)]
    assert lengths(answer) == expected


@given(lookups(), st.integers(min_value=0, max_value=2 * PAGES_MAX))
def test_the_longest_restorable_length_within_a_bound_is_one_that_can_be_restored(
    drawn: tuple[LookUp, Present], bound: int
) -> None:
    order, present = drawn

    longest = Answered(1, *restorable(order, present)).longest(bound)

    possible = [n for n in range(1, bound + 1) if can_end(order, present, order.floor + n)]
    assert longest == max(possible, default=0)
