"""Prefetch slots: the lowest free slot is taken, and frozen tables never change."""

import random

import numpy as np
import pytest

from lockstep.coordinator.operation import Phase
from lockstep.coordinator.seats import UNBOUNDED, Seat, Seats, SeatTable
from lockstep.errors import InternalError

ROOM = 6
PHASES = (Phase.QUERY, Phase.RESTORABLE, Phase.TRANSFER)


def random_walk(seed: int, seats: Seats, model: dict[int, Seat], changes: int) -> None:
    draw = random.Random(seed)
    for operation in range(1, changes + 1):
        action = draw.choice(("take", "take", "change", "give back"))
        phase, bound = draw.choice(PHASES), draw.choice((3, 8, UNBOUNDED))
        if action == "take" and len(model) < ROOM:
            lowest = min(set(range(ROOM)) - model.keys())
            assert seats.take(operation, phase, bound) == lowest, f"seed {seed}"
            model[lowest] = Seat(operation, phase, bound)
        elif action == "change" and model:
            seat = draw.choice(sorted(model))
            seats.change(seat, phase, bound)
            model[seat] = Seat(model[seat].operation, phase, bound)
        elif action == "give back" and model:
            seat = draw.choice(sorted(model))
            seats.give_back(seat)
            del model[seat]


@pytest.mark.parametrize("seed", range(20))
def test_a_seat_is_the_lowest_free_one_and_means_what_was_said_last(seed: int) -> None:
    seats, model = Seats(ROOM), dict[int, Seat]()
    taken, expected = list[dict[int, Seat]](), list[dict[int, Seat]]()
    for leg in range(30):
        random_walk(1000 * seed + leg, seats, model, 12)
        taken.append(seats.freeze().taken())
        expected.append(dict(model))

    assert taken == expected, f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_a_frozen_table_never_changes(seed: int) -> None:
    """P2: a verdict is read under the table frozen at launch, even if slots have changed since."""
    seats, model = Seats(ROOM), dict[int, Seat]()
    tables, at_launch = list[SeatTable](), list[tuple[bytes, int, dict[int, Seat]]]()
    for leg in range(20):
        random_walk(1000 * seed + leg, seats, model, 4)
        tables.append(seats.freeze())
        at_launch.append(contents(tables[-1]))

    assert [contents(table) for table in tables] == at_launch, f"seed {seed}"
    assert {table.rows.flags.writeable for table in tables} == {False}


def contents(table: SeatTable) -> tuple[bytes, int, dict[int, Seat]]:
    return table.rows.tobytes(), table.digest, table.taken()


def test_a_table_is_made_anew_only_after_a_change() -> None:
    seats = Seats(ROOM)
    seat = seats.take(1, Phase.QUERY)
    first = seats.freeze()
    assert seats.freeze() is first

    seats.change(seat, Phase.TRANSFER)

    assert seats.freeze() is not first


def test_seats_that_mean_the_same_have_one_digest_however_that_came() -> None:
    """Rule R2: ranks compare digests, so a digest depends only on the rows, not on their history."""
    one, other = Seats(ROOM), Seats(ROOM)
    one.take(7, Phase.TRANSFER)
    other.take(5, Phase.QUERY)
    other.freeze()
    other.give_back(0)
    other.take(7, Phase.QUERY, 3)
    other.change(0, Phase.TRANSFER)

    assert one.freeze().digest == other.freeze().digest
    assert np.array_equal(one.freeze().rows, other.freeze().rows)


def test_tables_that_differ_have_digests_that_differ() -> None:
    tables = [Seats(2) for _ in range(6)]
    tables[1].take(1, Phase.QUERY)
    tables[2].take(2, Phase.QUERY)
    tables[3].take(1, Phase.TRANSFER)
    tables[4].take(1, Phase.QUERY, 9)
    tables[5].take(2, Phase.QUERY)
    tables[5].take(1, Phase.QUERY)
    tables[5].give_back(0)

    digests = {each.freeze().digest for each in tables}

    assert len(digests) == len(tables)
    assert all(0 <= digest < 1 << 63 for digest in digests)


def test_more_prefetches_than_there_are_seats_are_a_bug_that_is_named() -> None:
    seats = Seats(1)
    seats.take(1, Phase.QUERY)

    with pytest.raises(InternalError, match="operation 2 finds no free prefetch slot of 1"):
        seats.take(2, Phase.QUERY)


def test_a_free_seat_cannot_be_given_back_or_given_a_meaning() -> None:
    seats = Seats(2)

    with pytest.raises(InternalError, match="prefetch slot 1 is free"):
        seats.give_back(1)
    with pytest.raises(InternalError, match="prefetch slot 1 is free"):
        seats.change(1, Phase.QUERY)
    assert [seats.take(operation, Phase.QUERY) for operation in (1, 2)] == [0, 1]
