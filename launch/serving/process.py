"""A rank of a group that serves: `torchrun ... -m lockstep.launch.serving.process --role prefill ...`.

`lockstep serve-sim` starts the same module with `--launched-by PID` in place of options.
"""

import os
import sys

from ..interruption import (
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

from typing import TYPE_CHECKING, NoReturn

import typer

from ...errors import LockstepError
from ..environment import RankEnvironment, read_rank_environment, take_settings
from ..first_error import exit_code, say, say_once
from ..meeting import JOIN_TIMEOUT_S, LOOPBACK, meet
from ..outcome import conclude
from ..replay import LAUNCHER_OPTION, PATIENCE_S, leave
from ..worker import Watch
from .group_options import EXIT_STATUSES, group_command
from .rank import run_group_rank
from .result import GroupResult
from .settings import GroupSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store


def main() -> None:
    """Run this process as one rank, and end it with the status that the others end with too."""
    started = sys.argv[1:2] == [LAUNCHER_OPTION]
    # Our own launcher says who it is, since it may have died while this process was starting.
    launcher = int(sys.argv[2]) if started else os.getppid()
    end_with(launcher)
    try:
        environment = read_rank_environment()
    except LockstepError as error:
        say(str(error))
        sys.exit(exit_code(error))

    def by_hand(settings: GroupSettings, host: str) -> None:
        result = _serve(settings, environment, launcher, host)
        if result is not None:
            replay = settings.replay
            leave(conclude(result.report, path=replay.report, table=replay.table))

    if started:
        _serve(GroupSettings.from_json(take_settings()), environment, launcher, LOOPBACK)
        return
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EXIT_STATUSES)(group_command(by_hand, ranks=environment.world_size))
    try:
        app()
    except LockstepError as error:
        _fail(error, environment, None)


def _serve(
    settings: GroupSettings, environment: RankEnvironment, launcher: int, host: str
) -> GroupResult | None:
    """Serve, and return the result on rank 0; end the process where that cannot be."""
    store: Store | None = None
    interrupted: Callable[[], bool] = bool

    def note() -> None:
        nonlocal interrupted
        interrupted = note_signals(patience_s=PATIENCE_S)

    def stopped() -> bool:
        # A launcher that was killed cannot stop its ranks any more.
        return interrupted() or os.getppid() != launcher

    try:
        store = meet(environment, timeout_s=JOIN_TIMEOUT_S)
        watch = Watch(stopped=stopped, on_joined=raise_on_signals, on_open=note)
        result = run_group_rank(settings, environment, store, watch=watch, host=host)
    except LockstepError as error:
        _fail(error, environment, store)
    except Interrupted:
        leave(EXIT_INTERRUPTED)
    ignore_signals()
    return result


def _fail(error: LockstepError, environment: RankEnvironment, store: "Store | None") -> NoReturn:
    """Say what went wrong unless another rank does, and end."""
    ignore_signals()
    say_once(error, environment, store)
    leave(exit_code(error))


if __name__ == "__main__":
    main()
