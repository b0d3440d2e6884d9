"""A rank of a replay: `torchrun --nproc-per-node N -m lockstep.launch.replay.replay [TRACE] [options]`.

Takes the options of `lockstep replay`. torch's launcher, when Lockstep uses it itself, starts the
same module with `--launched-by` in place of options.
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

# Importing torch takes seconds; a Ctrl-C in the meantime is no error to explain.
if __name__ == "__main__":
    end_on_signals()

from ...errors import LockstepError
from ..cli.environment import RankEnvironment, read_rank_environment, take_settings
from ..cli.exits import exit_code, say
from ..cli.options import run_command
from ..cli.settings import ReplaySettings
from .options import replay_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store

LAUNCHER_OPTION = "--launched-by"
"""Names the launcher of a rank that finds its settings in its environment."""
PATIENCE_S = 1.0
"""How long a rank that is interrupted has for the step that it is in."""


def main() -> None:
    """Run this process as one rank, and end it with the status that the others end with too."""
    # Our own launcher says who it is, since it may have died while this process was starting.
    started = sys.argv[1:2] == [LAUNCHER_OPTION]
    launcher = int(sys.argv[2]) if started else os.getppid()
    end_with(launcher)
    try:
        environment = read_rank_environment()
    except LockstepError as error:
        say(str(error))
        sys.exit(exit_code(error))
    rank = _Rank(environment, launcher)
    try:
        if started:
            rank.run(ReplaySettings.from_json(take_settings()))
        else:
            sys.exit(rank.run_with_options())
    except LockstepError as error:
        ignore_signals()
        rank.fail(error)
    except Interrupted:
        leave(EXIT_INTERRUPTED)


class _Rank:
    """Serves as one rank of a replay, in this process."""

    def __init__(self, environment: RankEnvironment, launcher: int) -> None:
        self._environment = environment
        self._launcher = launcher
        self._store: Store | None = None
        self._interrupted: Callable[[], bool] = lambda: False

    def run_with_options(self) -> int:
        """Take the settings from the command line."""
        arguments = sys.argv[1:]
        if not any(each.partition("=")[0] == "--ranks" for each in arguments):
            arguments = ["--ranks", str(self._environment.world_size), *arguments]
        return run_command(replay_command(lambda settings, _choice: self.run(settings)), arguments)

    def run(self, settings: ReplaySettings) -> int:
        """Meet the other ranks, replay, and report if this is rank 0."""
        from ..cli.meeting import JOIN_TIMEOUT_S, meet
        from ..cli.progress import progress_bar
        from .outcome import conclude
        from .timelines import write_timeline
        from .worker import Watch, run_rank

        self._store = meet(self._environment, timeout_s=JOIN_TIMEOUT_S)
        with progress_bar(shown=self._environment.rank == 0) as on_done:
            watch = Watch(
                on_done=on_done,
                stopped=self._stopped,
                on_joined=raise_on_signals,
                on_open=self._stop_on_signals,
                on_interrupted=ignore_signals,
            )
            replayed = run_rank(settings, self._environment, self._store, watch)
        ignore_signals()
        if replayed is not None:
            status = conclude(replayed.report, path=settings.report, table=settings.table)
            if settings.timeline is not None:
                write_timeline(settings.timeline, replayed.timelines, told=settings.table)
            leave(status)
        return 0

    def _stop_on_signals(self) -> None:
        self._interrupted = note_signals(patience_s=PATIENCE_S)

    def _stopped(self) -> bool:
        # A launcher that was killed cannot stop its ranks any more.
        return self._interrupted() or os.getppid() != self._launcher

    def fail(self, error: LockstepError) -> NoReturn:
        """Say what went wrong unless another rank does, and end."""
        from ..cli.first_error import say_once

        say_once(error, self._environment, self._store)
        leave(exit_code(error))


def leave(code: int) -> NoReturn:
    """End the process without waiting for threads that an error may have left behind."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
