"""A Chrome trace of events shows waits between ranks, concurrent calls, and unfinished operations."""

from lockstep.ranks.protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    OperationMoved,
    RequestReleased,
    RoundHeld,
    StepHalf,
    StoreCalled,
    TimedEvent,
)
from lockstep.telemetry.chrome_trace import trace_text
from lockstep.telemetry.kept_events import RankEvents
from tests.kit.telemetry.trace_file import TraceFile


def rank(number: int, *events: TimedEvent, clock: str = "a", wall_s: float = 0.0) -> RankEvents:
    return RankEvents(rank=number, clock=clock, wall_s=wall_s, left_out=0, events=events)


def drawn(*ranks: RankEvents) -> TraceFile:
    return TraceFile(trace_text(ranks))


def call(began_s: float, ended_s: float) -> StoreCalled:
    return StoreCalled("file", "read", 1, "kv", {"ok": 2}, 64, began_s, ended_s)


def test_a_round_says_which_rank_voted_last_and_an_arrow_leads_there() -> None:
    early = RoundHeld(1, voted_s=10.0, awaited_s=10.001, ended_s=10.006)
    late = RoundHeld(1, voted_s=10.005, awaited_s=10.0055, ended_s=10.006)

    timeline = drawn(rank(0, early), rank(1, StepHalf(1, True, 10.004, 10.0055), late))

    rounds = timeline.rounds()[1]
    assert [each.args["last_rank"] for each in rounds.values()] == [1, 1]
    assert {each.args["last_vote_us_after_first"] for each in rounds.values()} == {5000}
    ((begins, ends),) = timeline.arrows()
    assert (begins["pid"], ends["pid"]) == (0, 1)
    assert (begins["ts"], ends["ts"]) == (1000, 5000)


def test_a_round_that_one_rank_has_not_told_of_names_nobody() -> None:
    timeline = drawn(rank(0, RoundHeld(1, 1.0, 1.0, 2.0)), rank(1))

    assert timeline.rounds()[1][0].args == {"round": 1}
    assert timeline.arrows() == []


def test_calls_that_run_side_by_side_are_on_threads_of_their_own() -> None:
    calls = [call(1.0, 4.0), call(2.0, 3.0), call(3.5, 5.0), call(4.5, 6.0)]

    timeline = drawn(rank(0, *calls))

    assert [each.thread for each in timeline.named("read file")] == [
        "store file",
        "store file #2",
        "store file #2",
        "store file",
    ]
    assert timeline.crossings() == []


def test_an_operation_that_has_not_ended_stays_open_in_its_phase() -> None:
    life = (OperationBegan(7, "prefetch", "r", "query", 1.0), OperationMoved(7, "transfer", 2.0))

    (events,) = drawn(rank(0, *life)).lives("operation").values()

    assert [(each["ph"], each["name"]) for each in events] == [
        ("b", "lockstep.prefetch"),
        ("b", "query"),
        ("e", "query"),
        ("b", "transfer"),
    ]


def test_what_began_before_the_first_event_that_was_kept_is_left_out() -> None:
    timeline = drawn(
        rank(
            0,
            OperationMoved(3, "transfer", 1.0),
            OperationEnded(3, "prefetch", "complete", 2.0),
            RequestReleased("r", 3.0),
        )
    )

    assert timeline.lives("operation") == timeline.lives("request") == {}


def test_a_rank_on_another_clock_says_how_it_was_read() -> None:
    here = rank(0, StepHalf(1, True, 5.0, 6.0))
    there = rank(1, StepHalf(1, True, 105.5, 106.5), clock="b", wall_s=-100.0)

    timeline = drawn(here, there)

    assert [each.began for each in timeline.named("step")] == [0, 500_000_000]
    assert [each["clock_read_by"] for each in timeline.about["ranks"]] == [
        "the same clock",
        "the hosts' wall clocks",
    ]
    assert timeline.about["ranks"][1]["clock_error_us"] is None
