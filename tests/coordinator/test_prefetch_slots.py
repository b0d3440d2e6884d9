"""Prefetch slots: the lowest free slot is taken, and frozen tables never change."""

import random

import numpy as np
import pytest

from lockstep.coordinator.operation import Phase
from lockstep.coordinator.prefetch_slots import (
    UNBOUNDED,
    PrefetchSlot,
    PrefetchSlots,
    PrefetchSlotTable,
)
from lockstep.errors import InternalError

ROOM = 6
PHASES = (Phase.QUERY, Phase.RESTORABLE, Phase.TRANSFER)


def random_walk(
    seed: int, prefetch_slots: PrefetchSlots, model: dict[int, PrefetchSlot], changes: int
) -> None:
    draw = random.Random(seed)
    for operation in range(1, changes + 1):
        action = draw.choice(("take", "take", "change", "give back"))
        phase, bound = draw.choice(PHASES), draw.choice((3, 8, UNBOUNDED))
        if action == "take" and len(model) < ROOM:
            lowest = min(set(range(ROOM)) - model.keys())
            assert prefetch_slots.take(operation, phase, bound) == lowest, f"seed {seed}"
            model[lowest] = PrefetchSlot(operation, phase, bound)
        elif action == "change" and model:
            prefetch_slot = draw.choice(sorted(model))
            prefetch_slots.change(prefetch_slot, phase, bound)
            model[prefetch_slot] = PrefetchSlot(model[prefetch_slot].operation, phase, bound)
        elif action == "give back" and model:
            prefetch_slot = draw.choice(sorted(model))
            prefetch_slots.give_back(prefetch_slot)
            del model[prefetch_slot]


@pytest.mark.parametrize("seed", range(20))
def test_a_prefetch_slot_is_the_lowest_free_one_and_means_what_was_said_last(seed: int) -> None:
    prefetch_slots, model = PrefetchSlots(ROOM), dict[int, PrefetchSlot]()
    taken, expected = list[dict[int, PrefetchSlot]](), list[dict[int, PrefetchSlot]]()
    for leg in range(30):
        random_walk(1000 * seed + leg, prefetch_slots, model, 12)
        taken.append(prefetch_slots.freeze().taken())
        expected.append(dict(model))

    assert taken == expected, f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_a_frozen_table_never_changes(seed: int) -> None:
    """P2: a verdict is read under the table frozen at launch, even if slots have changed since."""
    prefetch_slots, model = PrefetchSlots(ROOM), dict[int, PrefetchSlot]()
    tables, at_launch = (
        list[PrefetchSlotTable](),
        list[tuple[bytes, int, dict[int, PrefetchSlot]]](),
    )
    for leg in range(20):
        random_walk(1000 * seed + leg, prefetch_slots, model, 4)
        tables.append(prefetch_slots.freeze())
        at_launch.append(contents(tables[-1]))

    assert [contents(table) for table in tables] == at_launch, f"seed {seed}"
    assert {table.rows.flags.writeable for table in tables} == {False}


def contents(table: PrefetchSlotTable) -> tuple[bytes, int, dict[int, PrefetchSlot]]:
    return table.rows.tobytes(), table.digest, table.taken()


def test_a_table_is_made_anew_only_after_a_change() -> None:
    prefetch_slots = PrefetchSlots(ROOM)
    prefetch_slot = prefetch_slots.take(1, Phase.QUERY)
    first = prefetch_slots.freeze()
    assert prefetch_slots.freeze() is first

    prefetch_slots.change(prefetch_slot, Phase.TRANSFER)

    assert prefetch_slots.freeze() is not first


def test_prefetch_slots_that_mean_the_same_have_one_digest_however_that_came() -> None:
    """Rule R2: ranks compare digests, so a digest depends only on the rows, not on their history."""
    one, other = PrefetchSlots(ROOM), PrefetchSlots(ROOM)
    one.take(7, Phase.TRANSFER)
    other.take(5, Phase.QUERY)
    other.freeze()
    other.give_back(0)
    other.take(7, Phase.QUERY, 3)
    other.change(0, Phase.TRANSFER)

    assert one.freeze().digest == other.freeze().digest
    assert np.array_equal(one.freeze().rows, other.freeze().rows)


def test_tables_that_differ_have_digests_that_differ() -> None:
    tables = [PrefetchSlots(2) for _ in range(6)]
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


def test_more_prefetches_than_there_are_prefetch_slots_are_a_bug_that_is_named() -> None:
    prefetch_slots = PrefetchSlots(1)
    prefetch_slots.take(1, Phase.QUERY)

    with pytest.raises(InternalError, match="operation 2 finds no free prefetch slot of 1"):
        prefetch_slots.take(2, Phase.QUERY)


def test_a_free_prefetch_slot_cannot_be_given_back_or_given_a_meaning() -> None:
    prefetch_slots = PrefetchSlots(2)

    with pytest.raises(InternalError, match="prefetch slot 1 is free"):
        prefetch_slots.give_back(1)
    with pytest.raises(InternalError, match="prefetch slot 1 is free"):
        prefetch_slots.change(1, Phase.QUERY)
    assert [prefetch_slots.take(operation, Phase.QUERY) for operation in (1, 2)] == [0, 1]
