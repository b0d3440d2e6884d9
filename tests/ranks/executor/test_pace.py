"""Pace: the number of bytes that one call to a store should move."""

import pytest

from lockstep.ranks.executor.pace import CALL_BYTES_MIN, Pace

MIB = 1 << 20


def after(calls: int, nbytes: int, seconds: float) -> int:
    """Return the call size that `Pace` advises after `calls` consecutive calls of `nbytes` bytes."""
    pace = Pace()
    for number in range(calls):
        pace.begin(number * seconds)
        pace.end(nbytes, (number + 1) * seconds)
    return pace.call_bytes


@pytest.mark.parametrize(
    ("mib_a_second", "expected_mib"), [(100, 4), (200, 4), (500, 10), (1000, 20), (10_000, 32)]
)
def test_a_call_moves_what_the_store_moves_in_a_fiftieth_of_a_second(
    mib_a_second: int, expected_mib: int
) -> None:
    found = after(50, 8 * MIB, 8 / mib_a_second)

    assert found == pytest.approx(expected_mib * MIB, rel=0.05)


def test_calls_that_run_side_by_side_count_together() -> None:
    pace = Pace()
    for number in range(50):
        now = number * 0.01
        for _ in range(5):
            pace.begin(now)
        for _ in range(5):
            pace.end(2 * MIB, now + 0.01)

    assert pace.call_bytes == pytest.approx(20 * MIB, rel=0.05)


def test_a_store_that_becomes_slow_gets_small_calls_again() -> None:
    pace = Pace()
    now = 0.0
    for seconds in [0.001] * 50 + [1.0] * 50:
        pace.begin(now)
        now += seconds
        pace.end(8 * MIB, now)

    assert pace.call_bytes == CALL_BYTES_MIN


@pytest.mark.parametrize("nbytes", [0, 4096, CALL_BYTES_MIN - 1])
def test_calls_that_found_little_to_move_say_nothing(nbytes: int) -> None:
    assert after(20, nbytes, 0.001) == CALL_BYTES_MIN


def test_calls_that_end_right_after_a_look_are_not_taken_for_quick_ones() -> None:
    """Calls that end just after the pace was measured do not count as a burst of fast calls."""
    pace = Pace()
    now = 0.0
    for _ in range(20):
        for _ in range(5):
            pace.begin(now)
        now += 0.2
        for _ in range(5):
            now += 0.0004
            pace.end(4 * MIB, now)

    assert pace.call_bytes == CALL_BYTES_MIN


def test_a_store_that_never_rests_is_looked_at_all_the_same() -> None:
    pace = Pace()
    pace.begin(0.0)
    for number in range(200):
        pace.begin(number * 0.01)
        pace.end(10 * MIB, (number + 1) * 0.01)

    assert pace.call_bytes == pytest.approx(20 * MIB, rel=0.05)
