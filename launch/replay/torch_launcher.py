"""Ranks as processes of this machine, which meet in a store that the launcher serves.

Nothing is restarted: a replay can be run again. A rank says itself, in one line, why it ends; only the
death of a rank that could not speak is explained here.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen, TimeoutExpired

from ..cli.environment import LOOPBACK, RankEnvironment, variables_of
from ..cli.exits import say
from ..cli.first_error import claim
from ..cli.interruption import ignore_signals, raise_on_signals
from ..cli.meeting import JOIN_TIMEOUT_S, host_store, of_attempt
from ..cli.settings import ReplaySettings
from .replay import LAUNCHER_OPTION

SHUTDOWN_TIMEOUT_S = 5.0
"""How long ranks have for an orderly end, once one has failed or after a signal; then they are
killed."""
TIMELINE_TIMEOUT_S = 60.0
"""The same where rank 0 may have timelines to write, which takes 2 s for each rank that has kept all it
can."""
_POLL_S = 0.05
_MODULE = "lockstep.launch.replay.replay"
"""The main function of a rank's process."""


class RankProcesses:
    """The ranks of one group, as processes of this machine. End them."""

    def __init__(self, settings: str, places: Sequence[RankEnvironment]) -> None:
        """Start a process for each rank, with the settings of its replay in JSON."""
        self._ranks: list[Popen[bytes]] = []
        command = (sys.executable, "-m", _MODULE, LAUNCHER_OPTION, str(os.getpid()))
        try:
            for place in places:
                # One by one: whatever comes in between, those that were started are ended. Each has a
                # session of its own, so that Ctrl-C reaches the launcher alone.
                variables = variables_of(place, settings)
                self._ranks += [Popen(command, env=variables, start_new_session=True)]
        except BaseException:
            self.end()
            raise

    def status(self) -> tuple[int, int | None] | None:
        """Return the status that the group has ended with, or None while no rank has failed.

        And the rank that was killed, which could not speak. 0 once all have ended in order.
        """
        codes = [each.poll() for each in self._ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed:
            return None if None in codes else (0, None)
        # Of those that have failed at once, the one that was killed has made the others fail.
        rank = min(failed, key=lambda each: codes[each] or 0)
        code = self._ranks[rank].returncode
        return (code, None) if code > 0 else (128 - code, rank)

    def end(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """End the ranks that are left, in order if they can in time, and by force if not."""
        left = [each for each in self._ranks if each.poll() is None]
        for each in left:
            _signal(each, signal.SIGTERM)
            # One that is stopped takes notice of no other signal before this one.
            _signal(each, signal.SIGCONT)
        until = time.monotonic() + timeout_s
        for each in left:
            with suppress(TimeoutExpired):
                each.wait(max(0.0, until - time.monotonic()))
        for each in left:
            if each.poll() is None:
                _signal(each, signal.SIGKILL)
                each.wait()


def launch_with_torch(settings: ReplaySettings) -> int:
    """Replay on `settings.ranks` processes; return the status to exit with.

    Raises `Interrupted` after SIGINT or SIGTERM, when no rank is left.
    """
    raise_on_signals()
    store, port = host_store(LOOPBACK, timeout_s=JOIN_TIMEOUT_S)
    ranks: RankProcesses | None = None
    try:
        places = places_here(settings.ranks, port)
        ranks = RankProcesses(settings.to_json(), places)
        while (ended := ranks.status()) is None:
            time.sleep(_POLL_S)
        status, died = ended
        if died is not None:
            # Before the others are ended, so that they leave it to this process to say why.
            claim(of_attempt(store))
            number = signal.Signals(status - 128).name
            say(f"rank {died} was killed by {number}; the others were ended")
        return status
    finally:
        ignore_signals()
        if ranks is not None:
            ranks.end(SHUTDOWN_TIMEOUT_S if settings.timeline is None else TIMELINE_TIMEOUT_S)
        del store
        raise_on_signals()


def places_here(ranks: int, port: int) -> list[RankEnvironment]:
    """Return the places of a group's ranks on this machine, which meet in a store at `port`."""
    return [
        RankEnvironment(
            rank=rank,
            world_size=ranks,
            local_rank=rank,
            local_world_size=ranks,
            master_addr=LOOPBACK,
            master_port=port,
            store_is_hosted=True,
        )
        for rank in range(ranks)
    ]


def _signal(rank: Popen[bytes], number: int) -> None:
    """Send a signal to the process of a rank, and to those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, number)
