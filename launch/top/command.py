"""The command `lockstep top`."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.live import Live

from ...errors import ConfigError
from .screen import screen
from .sighting import Sighting, addresses_of, look
from .window import Window

RECENT_S = 30.0
LONGER_S = 300.0


class Sightings:
    """The looks of the last minutes; older ones are let go of."""

    def __init__(self) -> None:
        self._seen: deque[Sighting] = deque()

    def add(self, sighting: Sighting) -> None:
        """Keep one more."""
        self._seen.append(sighting)
        while len(self._seen) > 1 and self._seen[1].at_s <= sighting.at_s - LONGER_S:
            self._seen.popleft()

    def windows(self) -> list[Window]:
        """Return what there is of the last seconds, of the last minutes, and since the opening."""
        now, whole = self._seen[-1], Window(self._seen[-1])
        starts: list[Sighting] = []
        for span in (RECENT_S, LONGER_S):
            start = next(each for each in self._seen if each.at_s >= now.at_s - span)
            if start is not now and start not in starts:
                starts.append(start)
        return [*(Window(now, start) for start in starts), whole]


def top(
    *address: Annotated[
        str,
        Parameter(
            help="Where rank 0 serves its metrics, as --metrics-port had it: PORT or HOST:PORT. The"
            " other ranks are looked for at the next ports, unless each is named or one scheduler"
            " answers for all.",
            required=True,
        ),
    ],
    every: Annotated[
        float, Parameter(help="Seconds between two looks.", validator=Number(gte=0.2, lte=3600))
    ] = 2.0,
    once: Annotated[
        bool, Parameter(help="Look twice, --every seconds apart, print, and end.")
    ] = False,
) -> None:
    """Watch a running group: what it hits, and why no more."""
    console = Console(highlight=False, emoji=False)
    sightings = Sightings()
    if once or not console.is_terminal:
        for number, _ in enumerate(_looks(address, every, sightings)):
            if number:
                console.print(screen(sightings.windows()))
                if once:
                    return
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for _ in _looks(address, every, sightings):
            live.update(screen(sightings.windows()), refresh=True)


def _looks(address: Sequence[str], every: float, sightings: Sightings) -> Iterator[None]:
    """Look again and again, and keep what is seen; raises `ConfigError` if nobody ever answers."""
    ports = 1
    while True:
        began = time.monotonic()
        sighting = look(addresses_of(address, ports), began)
        wanted = 1 if sighting.has_one_scheduler else sighting.world_size
        if len(address) == 1 and wanted > ports:
            ports = wanted
            continue
        if not sighting.ranks and ports == 1:
            raise ConfigError(
                f"nobody answers at {', '.join(sighting.silent)}; start the group with --metrics-port,"
                " and name that port"
            )
        sightings.add(sighting)
        yield
        time.sleep(max(0.0, began + every - time.monotonic()))
