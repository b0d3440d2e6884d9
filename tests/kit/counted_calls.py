"""Measures an action by the number of Python functions it calls, independent of machine speed."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls(action: Callable[[], object]) -> int:
    counted = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal counted
        counted += event == "call"

    before = sys.getprofile()
    # A garbage collection during the action would add the calls of the collector's callbacks.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return counted
