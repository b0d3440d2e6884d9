"""A rank of a group that serves: `python -m lockstep.launch.serving.process --settings JSON PID`."""

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

from typing import TYPE_CHECKING

from ...errors import LockstepError
from ..environment import read_rank_environment
from ..first_error import exit_code, say_once
from ..meeting import JOIN_TIMEOUT_S, meet
from ..replay import PATIENCE_S
from ..worker import Watch
from .rank import run_group_rank
from .settings import GroupSettings

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def main() -> None:
    """Run this process as one rank, and end it with the status that the others end with too."""
    settings, launcher = GroupSettings.from_json(sys.argv[2]), int(sys.argv[3])
    end_with(launcher)
    environment = read_rank_environment()
    store: Store | None = None
    interrupted = [lambda: False]

    def note() -> None:
        interrupted[0] = note_signals(patience_s=PATIENCE_S)

    def stopped() -> bool:
        # A launcher that was killed cannot stop its ranks any more.
        return interrupted[0]() or os.getppid() != launcher

    try:
        store = meet(environment, timeout_s=JOIN_TIMEOUT_S)
        watch = Watch(stopped=stopped, on_joined=raise_on_signals, on_open=note)
        run_group_rank(settings, environment, store, watch=watch)
        ignore_signals()
    except LockstepError as error:
        ignore_signals()
        say_once(error, environment, store)
        _leave(exit_code(error))
    except Interrupted:
        _leave(EXIT_INTERRUPTED)


def _leave(code: int) -> None:
    """End the process without waiting for threads that an error may have left behind."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
