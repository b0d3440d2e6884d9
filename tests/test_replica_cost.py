"""What a step and a command cost follows what they change (rule R15), counted in calls."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from ranks_in_turn import PAGE_TOKENS, RanksInTurn

from lockstep.ranks.config import WritePolicy


def calls(action: Callable[[], object]) -> int:
    """Return how many Python functions an action calls or resumes, whatever the machine's speed."""
    counted = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal counted
        counted += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return counted


def prompt(first: int, pages: int) -> list[int]:
    return [first, *range(100, 99 + pages * PAGE_TOKENS)]


def step(ranks: RanksInTurn) -> None:
    """One step without the checks of a test, which look at everything."""
    (cache,) = ranks.caches
    cache.open_round()
    cache.close_round()


def with_pins(count: int, host_pages: int) -> RanksInTurn:
    """Return a rank on which so many pins hold what is on the device only, for now or for good."""
    ranks = RanksInTurn(
        1,
        store=False,
        device_pages=2048,
        host_pages=host_pages,
        write_policy=WritePolicy.WRITE_BACK,
    )
    ranks.publish("r", prompt(1, pages=2))
    for number in range(count):
        assert ranks.caches[0].pin(f"p{number}", prompt(1, pages=2), ttl_s=1000.0)
    step(ranks)
    return ranks


@pytest.mark.parametrize("host_pages", [0, 2048])
def test_a_step_looks_at_no_pin_that_nothing_was_copied_for(host_pages: int) -> None:
    few, many = (with_pins(count, host_pages) for count in (1, 300))

    assert calls(lambda: step(few)) == calls(lambda: step(many))
