"""`lockstep replay`: check the settings, and start the ranks with the chosen launcher."""

import os

from ...small_engine.workload import count_requests
from ..cli.environment import SETTINGS_VARIABLE, export_to_ranks, take_settings
from ..cli.exits import say
from ..cli.interruption import ignore_signals, raise_on_signals
from ..cli.replay_settings import ReplaySettings
from ..cli.report_files import check_that_writable
from .options import LaunchChoice, replay_command
from .pool_memory import check_pool_memory
from .replay import LAUNCHER_OPTION

SHUTDOWN_TIMEOUT_S = 5
"""Seconds that interrupted ranks have for an orderly shutdown before they are killed."""
TIMELINE_TIMEOUT_S = 60
"""Seconds for an orderly shutdown if rank 0 writes timelines, which takes up to 2 s for each rank."""
_MODULE = "lockstep.launch.replay.replay"
"""The main module of a rank's process."""


def launch(settings: ReplaySettings, choice: LaunchChoice) -> int:
    """Check the settings, replay, and return the exit status.

    Raises `Interrupted` after SIGINT or SIGTERM, when all ranks have ended.
    """
    count_requests(settings.trace, settings.requests)
    if choice.ray_address is None:
        check_pool_memory(settings, ranks_here=settings.ranks)
    if settings.report is not None:
        check_that_writable(settings.report)
    if settings.timeline is not None:
        check_that_writable(settings.timeline, "timeline")
    if choice.launcher == "ray":
        from .ray_replay import launch_with_ray

        return launch_with_ray(settings, choice)
    return _launch_with_torch(settings)


def _launch_with_torch(settings: ReplaySettings) -> int:
    """Replay on `settings.ranks` local processes; if a rank fails, print the reason."""
    from ..cli.rank_processes import run_ranks

    command = ("-m", _MODULE, LAUNCHER_OPTION, str(os.getpid()))
    timeout_s = SHUTDOWN_TIMEOUT_S if settings.timeline is None else TIMELINE_TIMEOUT_S
    export_to_ranks({SETTINGS_VARIABLE: settings.to_json()})
    raise_on_signals()
    try:
        status, line = run_ranks(command, settings.ranks, shutdown_timeout_s=timeout_s)
    finally:
        ignore_signals()
        take_settings()
        raise_on_signals()
    if line:
        say(line)
    return status


replay = replay_command(launch)
