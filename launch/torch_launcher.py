"""Ranks as processes of this machine, started and watched by torch's elastic agent.

The agent hosts the store in which the ranks meet, on a port that the system chose. It does not
restart anything: a replay can be run again. A rank says itself, in one line, why it ends; only the
death of a rank that could not speak is explained here.
"""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .first_error import say
from .interruption import Interrupted, ignore_signals, raise_on_signals
from .replay import SETTINGS_OPTION
from .settings import ReplaySettings

SHUTDOWN_TIMEOUT_S = 5
"""How long ranks have for an orderly end after a signal; then they are killed."""


def launch_with_torch(settings: ReplaySettings) -> int:
    """Replay on `settings.ranks` processes; return the status to exit with.

    Raises `Interrupted` after SIGINT or SIGTERM, when no rank is left.
    """
    raise_on_signals()
    # What the agent logs is for its own developers, and each of its loggers has a level of its own,
    # so that only this silences it; the ranks, in processes of their own, speak for themselves.
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.ranks,
            run_id=Path(logs).name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        launcher = str(os.getpid())
        command = ("-m", "lockstep.launch.replay", SETTINGS_OPTION, settings.to_json(), launcher)
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _status(error)
        except SignalException:
            ignore_signals()
            raise Interrupted from None
        finally:
            logging.disable(logging.NOTSET)
            # The agent has put handlers of its own in their place.
            raise_on_signals()
    return 0


def _status(error: ChildFailedError) -> int:
    """Return the status of the rank that failed first; speak for one that was killed."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return int(failure.exitcode)
    number = -int(failure.exitcode)
    say(f"rank {rank} was killed by {signal.Signals(number).name}; the others were ended")
    return 128 + number
