"""The command `lockstep top`."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, RenderableType
from rich.live import Live

from ...errors import ConfigError
from .findings import silence_of
from .group_sample import GroupSample, addresses_of, look
from .screen import screen
from .window import Window

RECENT_S = 30.0
LONGER_S = 300.0


class GroupHistory:
    """Reads a group's metrics, and keeps the readings of the last five minutes."""

    def __init__(self, address: Sequence[str]) -> None:
        self._address = address
        self._ports = 1
        self._seen: deque[GroupSample] = deque()

    def look(self) -> None:
        """Read the metrics again; raise `ConfigError` if no rank has ever answered."""
        now = self._look()
        if not now.last_answer_s:
            raise ConfigError(
                f"{silence_of(now)}; the group has ended (see its log) or uses another port: give"
                " the one of --metrics-port, or of metrics_port under an engine"
            )
        # Counters can be compared only between readings of one run of the group. Drop the previous
        # reading if it has no rank's answer. After a restart of the group, drop all earlier readings.
        if self._seen and not self._seen[-1].ranks:
            self._seen.pop()
        if self._seen and not now.goes_on_from(self._seen[-1]):
            self._seen.clear()
        self._seen.append(now)
        while len(self._seen) > 1 and self._seen[1].at_s <= now.at_s - LONGER_S:
            self._seen.popleft()

    def _look(self) -> GroupSample:
        now = self._seen[-1] if self._seen else None
        while True:
            ports = self._ports
            now = look(addresses_of(self._address, ports), time.monotonic(), now)
            wanted = 1 if now.has_one_scheduler else now.world_size
            self._ports = wanted or ports
            if len(self._address) > 1 or wanted <= ports:
                return now

    def windows(self) -> list[Window]:
        """Return the windows of the last 30 s, of the last 5 min, and since the cache was opened."""
        now, whole = self._seen[-1], Window(self._seen[-1])
        starts: list[GroupSample] = []
        for span in (RECENT_S, LONGER_S):
            start = next(each for each in self._seen if each.at_s >= now.at_s - span)
            if start is not now and start not in starts:
                starts.append(start)
        return [*(Window(now, start) for start in starts), whole]


def top(
    *address: Annotated[
        str,
        Parameter(
            help="Address of rank 0's metrics, as in --metrics-port: PORT or HOST:PORT. The other ranks"
            " are expected at the next ports, unless all addresses are given or one scheduler"
            " answers for all ranks.",
            required=True,
        ),
    ],
    every: Annotated[
        float, Parameter(help="Seconds between two readings.", validator=Number(gte=0.2, lte=3600))
    ] = 2.0,
    once: Annotated[
        bool, Parameter(help="Read twice, --every seconds apart, print, and exit.")
    ] = False,
) -> None:
    """Watch a running group: its hits, and the causes of its misses."""
    console = Console(highlight=False, emoji=False)
    screens = _screens(address, every)
    if once or not console.is_terminal:
        for each in islice(screens, 1, 2 if once else None):
            console.print(each)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for each in screens:
            live.update(each, refresh=True)


def _screens(address: Sequence[str], every: float) -> Iterator[RenderableType]:
    """Read the metrics periodically, and yield the screen for each reading."""
    history = GroupHistory(address)
    while True:
        began = time.monotonic()
        history.look()
        yield screen(history.windows())
        time.sleep(max(0.0, began + every - time.monotonic()))
