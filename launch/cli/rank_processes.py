"""Run rank processes under torch's elastic launcher, and report the error of the first failed rank."""

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
"""No ranks are started if the open-file limit is below this; two ranks need 32 files at once."""
_POLL_S = 0.05
_CONSEQUENCE_S = 5.0
"""After the first failure of a rank, the other ranks report a lost peer within this many seconds."""


class RankErrors(ErrorHandler):
    """Writes the error of a rank to torch's error file, or prints it if there is no such file.

    A `LockstepError` is written as one line, and any other exception with its traceback. Pass an
    instance to torch's `record`.
    """

    def __init__(self, launcher: int) -> None:
        """`launcher` is the process id of this rank's launcher."""
        self._launcher = launcher

    def record_exception(self, e: BaseException) -> None:
        """Record the exception that ends this rank."""
        # Ignore signals, because an interrupted write would leave a partial error file, which torch's
        # launcher cannot read.
        ignore_signals()
        path = self._get_error_file_path()
        if not isinstance(e, LockstepError):
            super().record_exception(e)
        elif path is None:
            say(str(e))
        else:
            now, line = time.time(), in_options(str(e))
            # torch reads the time of a failure in whole seconds, but all ranks may fail within one
            # second. `failed_at` therefore includes the fraction.
            extra_info = {"py_callstack": line, "timestamp": str(int(now))}
            data = {"message": {"message": line, "extraInfo": extra_info}, "failed_at": now}
            Path(path).write_text(json.dumps({**data, "line": str(e)}), encoding="utf-8")
            if isinstance(e, GroupError):
                # Resume suspended ranks (SIGSTOP). Otherwise, torch would wait 30 s for each of them
                # before killing it.
                with suppress(psutil.Error):
                    for each in psutil.Process(self._launcher).children():
                        each.resume()


def run_ranks(
    command: Sequence[str],
    ranks: int,
    *,
    address: str = LOOPBACK,
    shutdown_timeout_s: int,
    show_output: bool = True,
) -> tuple[int, str]:
    """Run `python` with these arguments as `ranks` processes; return (exit status, error line).

    The processes connect to each other at `address`, an address of this machine, and are never
    restarted. If a rank fails, the other ranks are ended. The call returns when all processes have
    ended. The status is that of the first rank that failed, as a shell would give it, and 0 if none has
    failed. The line says why that rank failed, and is empty if the rank has printed the reason. If
    `show_output` is false, the output of the ranks is discarded. If this process is interrupted, the
    ranks have `shutdown_timeout_s` seconds to shut down in order.
    """
    if problem := why_ranks_cannot_start(address):
        return EXIT_GROUP, problem
    # Discard torch's log of the signals that it sends, because the returned error line says enough.
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
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.NONE if show_output else Std.ALL),
            # Do not let torch install its signal handlers. They would abort the ranks' shutdown at a
            # second Ctrl-C, and would undo `nohup`. Our handlers raise `Interrupted` only once.
            signals_to_handle="",
            shutdown_timeout=shutdown_timeout_s,
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _status_and_line(*min(error.failures.items(), key=lambda each: _order(each[1])))
    return 0, ""


@contextmanager
def rank_folder() -> Generator[str]:
    """Yield a temporary folder for files of ranks; remove folders of launchers that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/lock"):
        with suppress(OSError), left.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER) as folder,
        Path(folder, "unlocked").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Lock the file before it gets the name `lock`, because other launchers remove every folder
        # whose file `lock` is not locked.
        Path(lock.name).rename(Path(folder, "lock"))
        yield folder


def why_ranks_cannot_start(address: str) -> str:
    """Return why ranks cannot connect to each other at an address of this machine; "" if they can.

    Call it before the ranks start. If they cannot connect, torch retries for minutes and handles no
    signal meanwhile.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FILES_MIN:
        return f"the open-file limit is {most}, must be at least {_FILES_MIN}; run `ulimit -n 4096`"
    try:
        with socket.create_server((address, 0)) as listening:
            socket.create_connection(listening.getsockname(), _CONNECT_S).close()
    except OSError as error:
        remedy = "bring up the interface with this address (loopback: `ip link set lo up`)"
        return (
            f"ranks cannot connect to each other at {address}: {error.strerror or error}; {remedy}"
        )
    return ""


def _order(failure: ProcessFailure) -> tuple[bool, float]:
    """Return the sort key of a rank's failure; the failure that caused the others sorts first.

    Failures are sorted by time; ranks that torch ended come last. A rank that lost a peer sorts as if
    it had failed later, because another rank's failure is usually the cause.
    """
    was_ended = failure.exitcode in (EXIT_INTERRUPTED, -signal.SIGTERM)
    at = failure.error_file_data.get("failed_at", failure.timestamp)
    return was_ended, at + (_CONSEQUENCE_S if failure.exitcode == EXIT_GROUP else 0.0)


def _status_and_line(rank: int, failure: ProcessFailure) -> tuple[int, str]:
    if failure.exitcode >= 0:
        return failure.exitcode, failure.error_file_data.get("line", "")
    line = f"rank {rank} was killed by {failure.signal_name()}; the others were ended"
    return 128 - failure.exitcode, line
