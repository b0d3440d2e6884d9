"""Waiting for what another thread does."""

import threading
import time
from collections.abc import Callable
from typing import Final

GIVE_UP_S: Final = 30.0
"""Nothing healthy takes as long."""


def wait_for(happened: Callable[[], bool], what: str = "it") -> None:
    """Wait until something has happened; fails where that takes longer than anything healthy."""
    give_up = time.monotonic() + GIVE_UP_S
    while not happened():
        assert time.monotonic() < give_up, f"{what} did not happen in time"
        threading.Event().wait(0.002)
