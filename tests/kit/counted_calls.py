"""What an action costs, whatever the machine's speed: how many Python functions it calls."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls(action: Callable[[], object]) -> int:
    """Return how many Python functions an action calls or resumes, whatever the machine's speed."""
    counted = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal counted
        counted += event == "call"

    before = sys.getprofile()
    # What listens to collections would be counted as well, whenever one falls into the action.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return counted
