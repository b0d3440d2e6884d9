"""The groups of a run as whoever started them sees them: running, killed, ended, with a result."""

import signal
from collections.abc import Sequence
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from ..first_error import claim, say
from ..meeting import JOIN_TIMEOUT_S, LOOPBACK, host_store, of_attempt
from ..torch_launcher import RankProcesses, places_here
from .result import GroupResult, collect, collect_timelines
from .settings import GroupSettings

RESULT_TIMEOUT_S = 30.0
"""How long a group may take to hand in its result once all of its ranks have ended."""


class StartedGroup(Protocol):
    """One group that was started."""

    @property
    def name(self) -> str:
        """Its name in the directory."""
        ...

    def status(self) -> int | None:
        """Return the status that it has ended with, 0 in order; None while it runs."""
        ...

    def kill(self) -> None:
        """Kill all of its ranks at once."""
        ...

    def result(self) -> GroupResult | None:
        """Return what it has handed in; None if it ended without."""
        ...

    def timelines(self) -> Sequence[bytes]:
        """Return the events of its ranks (`RankEvents.pack`), once its result is there."""
        ...

    def end(self) -> None:
        """End what is left of it. Idempotent."""
        ...


class GroupStarter(Protocol):
    """What starts groups: processes of this machine, actors of a cluster."""

    @property
    def host(self) -> str:
        """The address of this process's host by which groups reach it."""
        ...

    @property
    def directory(self) -> str:
        """Where groups register if nothing else is said; empty for a file of the run's own."""
        ...

    def start(self, settings: GroupSettings) -> StartedGroup:
        """Start a group; returns at once."""
        ...


class ProcessGroup:
    """A group of processes of this machine."""

    def __init__(self, settings: GroupSettings) -> None:
        self.name = settings.name
        self._store, port = host_store(LOOPBACK, timeout_s=JOIN_TIMEOUT_S)
        places = places_here(settings.replay.ranks, port)
        self._meeting: Store = of_attempt(self._store)
        self._was_killed = False
        self._ranks = RankProcesses("lockstep.launch.serving.process", settings.to_json(), places)

    def status(self) -> int | None:
        """See `StartedGroup`."""
        ended = self._ranks.status()
        if ended is None:
            return None
        status, died = ended
        if died is not None and claim(self._meeting) and not self._was_killed:
            # The others leave it to this process to say why.
            number = signal.Signals(status - 128).name
            say(f"rank {died} of group {self.name} was killed by {number}")
        return status

    def kill(self) -> None:
        """See `StartedGroup`."""
        self._was_killed = True
        self._ranks.kill()

    def result(self) -> GroupResult | None:
        """See `StartedGroup`."""
        return collect(self._meeting, RESULT_TIMEOUT_S)

    def timelines(self) -> Sequence[bytes]:
        """See `StartedGroup`."""
        return collect_timelines(self._meeting)

    def end(self) -> None:
        """See `StartedGroup`."""
        self._ranks.end()


class ProcessStarter:
    """Starts groups as processes of this machine."""

    host = LOOPBACK
    directory = ""

    def start(self, settings: GroupSettings) -> StartedGroup:
        """See `GroupStarter`."""
        return ProcessGroup(settings)
