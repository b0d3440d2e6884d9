"""Deadlines in agreed time: only the last one set counts, and earlier ones use no memory."""

from lockstep.ranks.replica.core.deadlines import AgreedDeadlines


def test_a_deadline_that_is_set_in_each_step_keeps_no_more_entries_than_one() -> None:
    deadlines = AgreedDeadlines[str]()
    most, over = 0, list[str]()
    for now_ms in range(1, 10_000):
        deadlines.set("served", 3_600_000, now_ms)
        most = max(most, len(deadlines))
        over += deadlines.passed(now_ms)
    assert most < 100
    assert over == []
    assert deadlines.passed(9_999 + 3_599_999) == []
    assert deadlines.passed(9_999 + 3_600_000) == ["served"]


def test_a_deadline_from_before_any_time_runs_from_the_first_that_is_agreed_on() -> None:
    deadlines = AgreedDeadlines[str]()
    deadlines.set("early", 10, 0)
    deadlines.set("gone", 10, 0)
    deadlines.drop("gone")
    assert deadlines.passed(0) == []
    assert deadlines.passed(1_000) == []
    assert deadlines.passed(1_009) == []
    assert deadlines.passed(1_010) == ["early"]
