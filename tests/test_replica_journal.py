"""The journal: what equal histories have in common, whenever and however it is asked for."""

import sys
from collections.abc import Sequence
from decimal import Decimal

import pytest

from lockstep.ranks.replica.journal import Journal

HISTORY: list[Sequence[object]] = [
    ("take", "host", 2, "from", 7, (1 << 64) - 1),
    ("backup", 3, 4, [2, 0]),
    ("decide", None, "why"),
    ("engine", 1.5, True, b"fact"),
]


def journal_of(entries: Sequence[Sequence[object]]) -> Journal:
    journal = Journal()
    for entry in entries:
        journal.record(*entry)
    return journal


def test_a_digest_that_is_read_on_the_way_ends_as_one_that_is_not() -> None:
    """A rank may look at its statistics at any time."""
    read = Journal()
    seen = {read.digest}
    for entry in HISTORY:
        read.record(*entry)
        seen.add(read.digest)
        assert read.digest in seen

    assert len(seen) == len(HISTORY) + 1
    assert read.digest == journal_of(HISTORY).digest
    assert 0 <= read.digest < 1 << 63


@pytest.mark.parametrize("left_out", range(len(HISTORY)))
def test_a_history_that_lacks_an_entry_has_another_digest(left_out: int) -> None:
    shorter = HISTORY[:left_out] + HISTORY[left_out + 1 :]

    assert journal_of(shorter).digest != journal_of(HISTORY).digest


def test_entries_in_another_order_have_another_digest() -> None:
    assert journal_of(HISTORY[::-1]).digest != journal_of(HISTORY).digest


def test_the_same_parts_divided_otherwise_have_another_digest() -> None:
    histories: list[list[Sequence[object]]]
    histories = [[("ab", "c")], [("a", "bc")], [("ab",), ("c",)], [("abc",)]]

    assert len({journal_of(history).digest for history in histories}) == len(histories)


def test_equal_entries_have_one_digest_however_their_parts_are_shared() -> None:
    """Text may be one object on one rank and several on another."""
    known, made = sys.intern("request seven"), b"request seven".decode()
    assert known is not made

    assert journal_of([(known, known)]).digest == journal_of([(known, made)]).digest


def test_a_list_that_changes_after_it_was_recorded_counts_as_it_was() -> None:
    counts = [2, 0]
    journal = journal_of([("backup", counts)])
    counts[0] = 9

    assert journal.digest == journal_of([("backup", [2, 0])]).digest


@pytest.mark.parametrize(
    ("fact", "same", "other"),
    [
        (Decimal("1.5"), Decimal("1.5"), Decimal("2.5")),
        (1 << 70, 1 << 70, 1 << 71),
        ("half a pair: \ud800", "half a pair: \ud800", "half a pair: \ud801"),
    ],
    ids=["kind", "number", "text"],
)
def test_facts_that_only_the_engine_understands_are_told_apart(
    fact: object, same: object, other: object
) -> None:
    known, again, changed = (journal_of([("engine", each)]) for each in (fact, same, other))

    assert known.digest == again.digest
    assert known.digest != changed.digest
