"""Replays of real ranks with `--timeline`: the file matches the report."""

from itertools import pairwise

import pytest

from lockstep.launch.replay.report import Report
from tests.kit.launch.replays import replay
from tests.kit.telemetry.trace_file import TraceFile, are_nested

pytestmark = pytest.mark.distributed

SMALL = ("--requests", 40, "--device-pages", 120, "--host-pages", 110, "--concurrency", 4)
"""Pools so small that every tier moves bytes in both directions."""

Told = tuple[Report, TraceFile]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("timeline")
    store = ("--store", (folder / "store").as_uri())
    report = replay(
        folder / "report.json", "--ranks", 2, *SMALL, *store, "--timeline", folder / "t.json"
    )
    return report, TraceFile.read(folder / "t.json")


def begun(operations: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the counts of operations that began: all but `no_room`, which no timeline records."""
    return {
        kind: {how: count for how, count in outcomes.items() if how != "no_room"}
        for kind, outcomes in operations.items()
    }


def test_every_round_is_on_every_rank(replayed: Told) -> None:
    report, timeline = replayed
    rounds = len(timeline.rounds())

    # The last round may still be in flight when a rank writes its part of the timeline.
    assert rounds in (report["rounds"], report["rounds"] - 1)
    assert sorted(timeline.rounds()) == list(range(1, rounds + 1))
    assert list(timeline.processes.values()) == ["rank 0", "rank 1"]
    assert {tuple(sorted(ranks)) for ranks in timeline.rounds().values()} == {(0, 1)}


def test_no_rank_has_a_verdict_before_every_rank_has_voted(replayed: Told) -> None:
    _, timeline = replayed
    rounds = [timeline.rounds()[number].values() for number in sorted(timeline.rounds())]

    votes = [max(each.began for each in ranks) for ranks in rounds]
    verdicts = [min(each.ended for each in ranks) for ranks in rounds]

    assert [at for at, last in enumerate(votes) if verdicts[at] < last] == []
    assert [late for late, earlier in pairwise(verdicts) if earlier < late] == []


def test_slices_of_one_thread_hold_each_other_or_do_not_touch(replayed: Told) -> None:
    _, timeline = replayed

    assert timeline.crossings() == []
    waits = timeline.named("wait for round")
    assert {each.thread for each in waits} == {"engine"}
    assert len(waits) == len(timeline.named("round"))


def test_operations_live_from_their_first_phase_to_their_outcome(replayed: Told) -> None:
    report, timeline = replayed
    lives = timeline.lives("operation")

    assert [life for life in lives.values() if not are_nested(life)] == []
    assert timeline.operations(0) == timeline.operations(1)
    assert begun(timeline.operations(0)) == begun(report["operations"])


def test_requests_live_from_their_first_operation_until_they_leave(replayed: Told) -> None:
    report, timeline = replayed
    lives = timeline.lives("request").values()

    assert [life for life in lives if not are_nested(life)] == []
    admitted = [each for life in lives for each in life if each["name"] == "admitted"]
    assert {life[0]["ph"] + life[-1]["ph"] for life in lives} == {"be"}
    assert len(admitted) >= 2 * report["requests"]
