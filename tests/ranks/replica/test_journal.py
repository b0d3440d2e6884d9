"""The journal: equal histories have equal digests, whenever and however the digest is read."""

import re
import sys
from collections.abc import Sequence

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.replica.core.journal import Journal
from tests.kit.ranks.in_turn import HostRanksInTurn

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
    """Reading the digest between entries does not change later digests."""
    read = Journal()
    seen = [(read.digest, read.digest)]
    for entry in HISTORY:
        read.record(*entry)
        seen.append((read.digest, read.digest))

    assert all(one == again for one, again in seen)
    assert len(set(seen)) == len(HISTORY) + 1
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
    """Equal entries have equal digests, whether their texts are one object or several."""
    known, made = sys.intern("request seven"), b"request seven".decode()
    assert known is not made

    assert journal_of([(known, known)]).digest == journal_of([(known, made)]).digest


def test_a_set_and_a_mapping_count_as_they_are_sorted() -> None:
    one, other = ({"a": 1, "b": {"c", "d"}}, {"b": frozenset({"d", "c"}), "a": 1})

    assert journal_of([("engine", one)]).digest == journal_of([("engine", other)]).digest


def test_a_list_that_changes_after_it_was_recorded_counts_as_it_was() -> None:
    counts = [2, 0]
    journal = journal_of([("backup", counts)])
    counts[0] = 9

    assert journal.digest == journal_of([("backup", [2, 0])]).digest


@pytest.mark.parametrize(
    ("fact", "named"),
    [
        (object(), "object <object object at"),
        (1 << 64, "int 18446744073709551616"),
        ("half a pair: \ud800", r"str 'half a pair: \ud800'"),
        (("adapter", [object]), "tuple ('adapter', [<class 'object'>])"),
    ],
    ids=["object", "number", "text", "nested"],
)
def test_a_fact_without_bytes_of_its_own_is_refused_by_name_and_changes_nothing(
    fact: object, named: str
) -> None:
    """Rule R2: a fact without a canonical encoding is refused: its `repr` may differ between ranks."""
    ranks = HostRanksInTurn()
    before = ranks.every(lambda cache: (cache.inspection.digest, cache.inspection.journal.count))

    for cache in ranks.caches:
        with pytest.raises(
            UsageError, match=rf"^engine: {re.escape(named)}.* has no bytes that are"
        ):
            cache.digest_facts("adapters", fact)

    after = ranks.every(lambda cache: (cache.inspection.digest, cache.inspection.journal.count))
    assert after == before
    ranks.step()


@pytest.mark.parametrize(
    ("name", "message"),
    [("\ud800", "^request: str "), (0, "^the name of a request must be text, not 0$")],
    ids=["half a pair", "number"],
)
def test_a_request_whose_name_has_no_bytes_is_refused_and_not_known(
    name: str, message: str
) -> None:
    ranks = HostRanksInTurn()

    for cache in ranks.caches:
        with pytest.raises(UsageError, match=message):
            cache.prefetch(name, [1, 2, 3, 4])

    assert ranks.every(lambda cache: len(list(cache.inspection.requests))) == 0


def test_a_fact_that_changes_after_it_was_told_is_shown_as_it_was() -> None:
    fact = [1, 2]
    journal = journal_of([("engine", fact)])
    fact[0] = 9

    assert journal.last(1) == (0, ["engine [1, 2]"])


def test_no_error_tells_a_tenant_s_namespace() -> None:
    """Errors and journal never contain a namespace, because its salt separates tenants."""
    ranks = HostRanksInTurn()
    ranks.every(lambda cache: cache.prefetch("r", [1, 2, 3, 4], "s3kr1t"))

    with pytest.raises(UsageError, match="another namespace") as raised:
        ranks.caches[0].prefetch("r", [1, 2, 3, 4], "0th3r")

    assert "s3kr1t" not in str(raised.value)
    assert "0th3r" not in str(raised.value)
    assert "s3kr1t" not in str(ranks.caches[0].inspection.journal.last(100))
