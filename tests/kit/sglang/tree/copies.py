"""Copies of one rank that a test holds, or lets fail."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.orders import Direction


class Copies:
    """Holds the copies of a rank's `host`."""

    host: HostCache

    @contextmanager
    def copies_held(self, direction: Direction) -> Generator[Callable[[], None]]:
        """Hold this rank's copies in a direction until the block ends, or calls what it is given."""
        ended = threading.Event()
        with self._before_copies(direction, lambda: ended.wait(60)):
            try:
                yield ended.set
            finally:
                ended.set()

    @contextmanager
    def copies_failing(
        self, direction: Direction, fails: Callable[[], bool] = lambda: True
    ) -> Generator[None]:
        """Let this rank's copies in a direction fail until the block ends, where `fails` says so."""

        def fail() -> None:
            if fails():
                raise RuntimeError("planted: this copy fails")

        with self._before_copies(direction, fail):
            yield

    @contextmanager
    def _before_copies(self, direction: Direction, act: Callable[[], object]) -> Generator[None]:
        host: Any = self.host
        copies = host._executor._copies
        copy = copies._copy

        def act_and_copy(job: Any) -> None:
            if job.direction is direction:
                act()
            copy(job)

        copies._copy = act_and_copy
        try:
            yield
        finally:
            copies._copy = copy
