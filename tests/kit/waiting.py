"""Waits for a condition that another thread makes true."""

import threading
import time
from collections.abc import Callable
from typing import Final

GIVE_UP_S: Final = 30.0
"""Seconds after which a wait fails, longer than any healthy operation takes."""


def wait_for(happened: Callable[[], bool], what: str = "it") -> None:
    """Wait until `happened()` is true; fail after `GIVE_UP_S` with `what` in the message."""
    give_up = time.monotonic() + GIVE_UP_S
    while not happened():
        assert time.monotonic() < give_up, f"{what} did not happen in time"
        threading.Event().wait(0.002)
