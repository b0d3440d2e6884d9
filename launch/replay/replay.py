"""A rank of a replay: `torchrun --nproc-per-node N -m lockstep.launch.replay.replay [TRACE] [options]`.

The module takes the options of `lockstep replay`. That command also starts this module, but passes the
settings in an environment variable instead of options.
"""

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from ..cli.interruption import (
    EXIT_INTERRUPTED,
    Interrupted,
    end_on_signals,
    end_with,
    ignore_signals,
    note_signals,
    raise_on_signals,
)

# Until torch is imported, which takes seconds, a signal should end the process without a traceback.
if __name__ == "__main__":
    end_on_signals()

from ...errors import LockstepError
from ..cli.environment import read_rank_environment, take_settings
from ..cli.exits import EXIT_FAULT, exit_code
from ..cli.options import run_command
from ..cli.replay_settings import ReplaySettings
from .options import replay_command

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCHER_OPTION = "--launched-by"
"""Option that selects the settings in the environment; its value is the launcher's process id."""
PATIENCE_S = 1.0
"""Seconds that an interrupted rank has to finish its current step before `Interrupted` is raised."""


def main() -> None:
    """Run this process as one rank, and exit with the rank's exit status."""
    # Use the process id from the option, because the launcher may already have died, which changes the
    # parent process.
    started = sys.argv[1:2] == [LAUNCHER_OPTION]
    launcher = int(sys.argv[2]) if started else os.getppid()
    end_with(launcher)
    from torch.distributed.elastic.multiprocessing.errors import record

    from ..cli.rank_processes import RankErrors

    rank = _Rank(launcher)
    try:
        status = record(rank.run if started else rank.run_with_options, RankErrors(launcher))()
    except LockstepError as error:
        _leave(exit_code(error))
    except Interrupted:
        _leave(EXIT_INTERRUPTED)
    except BrokenPipeError:
        _leave(EXIT_FAULT)
    sys.exit(status)


class _Rank:
    """Runs one rank of a replay in this process."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._interrupted: Callable[[], bool] = lambda: False

    def run_with_options(self) -> int:
        """Run the rank with settings from the command line, as under torchrun."""
        arguments = sys.argv[1:]
        if not any(each.partition("=")[0] == "--ranks" for each in arguments):
            arguments = ["--ranks", str(read_rank_environment().world_size), *arguments]
        return run_command(replay_command(lambda settings, _choice: self.run(settings)), arguments)

    def run(self, settings: ReplaySettings | None = None) -> int:
        """Join the other ranks, replay, and print the report on rank 0.

        If `settings` is None, the settings that `lockstep replay` put into the environment are used.
        """
        from ..cli.progress import progress_bar
        from .outcome import conclude
        from .worker import Watch, run_rank

        settings = settings or ReplaySettings.from_json(take_settings())
        environment = read_rank_environment()
        with progress_bar(shown=environment.rank == 0) as on_done:
            watch = Watch(
                on_done=on_done,
                stopped=self._stopped,
                on_joined=raise_on_signals,
                on_open=self._stop_on_signals,
                on_interrupted=ignore_signals,
            )
            replayed = run_rank(settings, environment, watch)
        ignore_signals()
        if replayed is not None:
            _leave(conclude(replayed, settings))
        return 0

    def _stop_on_signals(self) -> None:
        self._interrupted = note_signals(patience_s=PATIENCE_S)

    def _stopped(self) -> bool:
        # A rank stops if its launcher was killed, because a dead launcher cannot stop its ranks.
        return self._interrupted() or os.getppid() != self._launcher


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads, because an error may have left threads that never end."""
    for each in (sys.stdout, sys.stderr):
        # stdout or stderr is None if the process was started without it, for example by a service
        # manager.
        if each is not None:
            each.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
