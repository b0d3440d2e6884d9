"""A replay's progress without a terminal: one line a minute, with the current hit rate."""

import pytest

from lockstep.launch.cli.progress import PAUSE_S, Progress, progress_bar
from lockstep.small_engine.counts import ReplayCounts


def test_a_long_run_says_once_a_minute_how_far_it_is_and_what_it_hits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]

    with progress_bar(shown=True, clock=lambda: now[0]) as on_done:
        for second in range(int(2.5 * PAUSE_S)):
            now[0] = float(second)
            counts = ReplayCounts(prompt_tokens=200, computed_tokens=150)
            on_done(Progress.of(second, 1000, counts))

    assert capsys.readouterr().err.splitlines() == [
        "lockstep: 60 of 1,000 requests, 25.0 % hit",
        "lockstep: 120 of 1,000 requests, 25.0 % hit",
    ]


def test_a_short_run_and_a_rank_that_does_not_show_say_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar(shown=True) as on_done:
        on_done(Progress(5, 10))
    with progress_bar(shown=False, clock=lambda: 1e9) as on_done:
        on_done(Progress(5, 10))

    assert capsys.readouterr().err == ""
