"""The error path of a divergence: the error names the first entry that differs."""

from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.coordinator.divergence import ENTRIES_GATHERED, Recorder, explain, first_difference

entries = st.lists(st.sampled_from("abc"), max_size=12)


def test_a_recorder_keeps_the_last_entries_and_counts_all() -> None:
    """Rule R10: a recorder counts all entries, but keeps only the last ones, so memory is bounded."""
    recorder = Recorder(capacity=3)
    for number in range(5):
        recorder.record("take", number, "host")

    assert recorder.count == 5
    assert recorder.last(10) == (2, ["take 2 host", "take 3 host", "take 4 host"])
    assert recorder.last(2) == (3, ["take 3 host", "take 4 host"])
    assert recorder.last(0) == (5, [])
    assert Recorder().last(10) == (0, [])


@given(common=entries, tails=st.lists(entries, min_size=2, max_size=4))
def test_the_first_difference_is_where_the_first_rank_left_the_others(
    common: list[str], tails: list[list[str]]
) -> None:
    ranks = [common + tail for tail in tails]

    assert first_difference([(0, rank) for rank in ranks]) == obvious_difference(ranks)


def obvious_difference(ranks: list[list[str]]) -> str | None:
    for at, entries_there in enumerate(zip_longest(*ranks, fillvalue="nothing")):
        if len(set(entries_there)) > 1:
            text = "; ".join(f"rank {rank}: {entry}" for rank, entry in enumerate(entries_there))
            return f"the first entry that differs is number {at} ({text})"
    return None


@given(
    journal=st.lists(st.sampled_from("abc"), min_size=10, max_size=20),
    starts=st.lists(st.integers(0, 9), min_size=2, max_size=4),
)
def test_recorders_that_reach_back_differently_are_compared_where_all_do(
    journal: list[str], starts: list[int]
) -> None:
    recorders = [(start, journal[start:]) for start in starts]
    assert first_difference(recorders) is None

    index = max(starts)
    first = starts[0]
    recorders[0] = (first, [*journal[first:index], "other", *journal[index + 1 :]])
    found = first_difference(recorders)
    assert found is not None
    assert f"is number {index} (rank 0: other; rank 1: {journal[index]}" in found


def test_every_rank_gets_the_same_explanation() -> None:
    recorders = [recorder_of("insert 1", "evict 2"), recorder_of("insert 1", "evict 3")]

    message = (
        "the ranks differ in state digest: the first entry that differs is number 1"
        " (rank 0: evict 2; rank 1: evict 3)"
    )
    assert explained(recorders, ["state digest"]) == [message] * 2


def test_a_difference_further_back_than_the_recorders_is_not_made_up() -> None:
    recorders = [recorder_of(first, *["tick"] * ENTRIES_GATHERED) for first in ("a", "b")]

    (message,) = set(explained(recorders, ["state digest"]))
    assert message == (
        "the ranks differ in state digest: their flight recorders are equal in all entries kept"
    )


def test_ranks_that_differ_in_their_count_of_rounds_are_not_said_to_differ_in_state() -> None:
    recorders = [recorder_of("insert 1"), recorder_of("insert 1")]

    (message,) = set(explained(recorders, ["round"]))
    assert message.startswith("the ranks differ in round: their flight recorders are")


def test_ranks_of_different_starts_do_not_compare_what_they_have_done() -> None:
    recorders = [recorder_of("insert 1"), recorder_of("insert 2")]

    (message,) = set(explained(recorders, ["epoch", "state digest"]))
    assert message == (
        "the ranks differ in epoch and state digest: they belong to different starts of the group;"
        " restart all"
    )


def test_a_rank_that_is_lost_meanwhile_still_leaves_an_explanation() -> None:
    group = InProcessGroup(2)
    group.member(1).close()

    error = explain(group.member(0), recorder_of("insert 1"), ["state digest"], 20.0)

    assert str(error) == (
        "the ranks differ in state digest, and their flight recorders could not be gathered: "
        "rank 1 has left the group"
    )


@pytest.mark.parametrize(
    ("lengths", "number"),
    [
        ((0, 3), "is number 0 "),
        pytest.param((1, 600), "", id="further back than the recorders"),
        ((600, 601), "is number 600 "),
    ],
)
def test_a_rank_that_fell_behind_is_named_with_nothing(
    lengths: tuple[int, int], number: str
) -> None:
    behind, ahead = (recorder_of(*["tick"] * length) for length in lengths)

    (message, _) = explained([behind, ahead], ["state digest"])

    assert f"{number}(rank 0: nothing; rank 1: tick)" in message


def recorder_of(*entries: str) -> Recorder:
    recorder = Recorder()
    for entry in entries:
        recorder.record(*entry.split())
    return recorder


def explained(recorders: list[Recorder], different: list[str]) -> list[str]:
    group = InProcessGroup(len(recorders))
    with ThreadPoolExecutor(len(recorders)) as pool:
        running = [
            pool.submit(explain, group.member(rank), recorder, different, 20.0)
            for rank, recorder in enumerate(recorders)
        ]
        return [str(each.result(60)) for each in running]
