"""Rank processes under torch's elastic launcher, and the error of the first of them that failed."""

import fcntl
import json
import logging
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...errors import GroupError, LockstepError
from .environment import LOOPBACK
from .exits import EXIT_GROUP, in_options, say
from .interruption import EXIT_INTERRUPTED, ignore_signals

_FOLDER = "lockstep-ranks-"
_CONNECT_S = 5.0
_FILES_MIN = 64
"""Two ranks start with 32."""
_POLL_S = 0.05
_CONSEQUENCE_S = 5.0
"""How much later than its cause a rank may notice that it has lost its peers."""


class RankErrors(ErrorHandler):
    """Records a `LockstepError` as one line where torch's launcher finds it, and says it without one.

    To be given to `record`. Other exceptions are recorded with their traceback.
    """

    def __init__(self, launcher: int) -> None:
        """`launcher` is the process that has started this rank."""
        self._launcher = launcher

    def record_exception(self, e: BaseException) -> None:
        """Record the exception that ends this rank."""
        # A file that is half written would break the launcher.
        ignore_signals()
        path = self._get_error_file_path()
        if not isinstance(e, LockstepError):
            super().record_exception(e)
        elif path is None:
            say(str(e))
        else:
            now, line = time.time(), in_options(str(e))
            # As torch writes it, which reads whole seconds: all ranks may fail in one.
            told = {"py_callstack": line, "timestamp": str(int(now))}
            data = {"message": {"message": line, "extraInfo": told}, "failed_at": now}
            Path(path).write_text(json.dumps({**data, "line": str(e)}), encoding="utf-8")
            if isinstance(e, GroupError):
                # torch would wait 30 s for a rank that is stopped, before it kills it.
                with suppress(psutil.Error):
                    for each in psutil.Process(self._launcher).children():
                        each.resume()


def run_ranks(
    command: Sequence[str],
    ranks: int,
    *,
    address: str = LOOPBACK,
    shutdown_timeout_s: int,
    are_heard: bool = True,
) -> tuple[int, str]:
    """Run `python` with these arguments on so many ranks, which meet at an address of this machine.

    Returns when all have ended: 0, or what a shell says of the first that failed, after which the
    others were ended; and why it failed, in one line, unless it has said so itself. Nothing is
    restarted, since a run can be repeated. Ranks that are not heard print nothing.
    `shutdown_timeout_s` is how long ranks have for an orderly end if this process is interrupted.
    """
    if problem := obstacle_to_ranks(address):
        return EXIT_GROUP, problem
    # torch tells of each signal that it sends; what a user has to know is in what is returned.
    log = logging.getLogger("torch.distributed.elastic")
    log.handlers, log.propagate = [logging.NullHandler()], False
    with rank_folder() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="lockstep",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{address}:0",
            rdzv_configs={"is_host": True},
            local_addr=address,
            max_restarts=0,
            monitor_interval=_POLL_S,
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.NONE if are_heard else Std.ALL),
            # Ours raise `Interrupted`, once: torch's would break off the end of the ranks at a second
            # Ctrl-C, and undo `nohup`.
            signals_to_handle="",
            shutdown_timeout=shutdown_timeout_s,
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _told(*min(error.failures.items(), key=lambda each: _order(each[1])))
    return 0, ""


@contextmanager
def rank_folder() -> Generator[str]:
    """Yield a folder for what ranks write, and remove those of launchers that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/lock"):
        with suppress(OSError), left.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER) as folder,
        Path(folder, "unlocked").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Renamed once it is locked: another launcher removes a folder whose lock nobody holds.
        Path(lock.name).rename(Path(folder, "lock"))
        yield folder


def obstacle_to_ranks(address: str) -> str:
    """Return why ranks cannot meet at an address of this machine, or nothing.

    torch would try for minutes, and hear no signal meanwhile.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FILES_MIN:
        return f"open files: {most} at most, and ranks need {_FILES_MIN} or more; `ulimit -n 4096`"
    try:
        with socket.create_server((address, 0)) as listening:
            socket.create_connection(listening.getsockname(), _CONNECT_S).close()
    except OSError as error:
        remedy = "bring up the interface that has this address, loopback by `ip link set lo up`"
        return f"ranks cannot meet at {address}: {error.strerror or error}; {remedy}"
    return ""


def _order(failure: ProcessFailure) -> tuple[bool, float]:
    """Order failures of one group by time, the cause of the others first.

    Ranks that torch ended come last.
    """
    was_ended = failure.exitcode in (EXIT_INTERRUPTED, -signal.SIGTERM)
    at = failure.error_file_data.get("failed_at", failure.timestamp)
    return was_ended, at + (_CONSEQUENCE_S if failure.exitcode == EXIT_GROUP else 0.0)


def _told(rank: int, failure: ProcessFailure) -> tuple[int, str]:
    if failure.exitcode >= 0:
        return failure.exitcode, failure.error_file_data.get("line", "")
    line = f"rank {rank} was killed by {failure.signal_name()}; the others were ended"
    return 128 - failure.exitcode, line
