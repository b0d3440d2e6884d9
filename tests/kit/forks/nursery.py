"""A process that imports an engine once and then forks on request: `nursery FD MODULE...`.

FD is the socket on which requests arrive. A request names a function, a working folder, a log file and
environment variables. It also passes a file descriptor, which connects the fork with the client. The
reply has the import error or None, and the fork's process id. A request cannot change a variable that a
module reads during import, because the import is over.
"""

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle


def serve(control: Connection, modules: Sequence[str]) -> None:
    """Fork a process for each request until the client closes the connection."""
    failed = import_all(modules)
    while True:
        try:
            called, folder, log, environment = control.recv()
        except EOFError:
            return
        handle = recv_handle(control)
        pid = 0 if failed else os.fork()
        if not failed and pid == 0:
            control.close()
            become(called, handle, folder, log, environment)
        os.close(handle)
        control.send((failed, pid))


def import_all(modules: Sequence[str]) -> str | None:
    """Import an engine's modules and set multiprocessing to fork; return the import error or None."""
    try:
        for name in modules:
            import_module(name)
    except Exception:  # noqa: BLE001 - whatever failed is the answer.
        return traceback.format_exc()
    # Make engines fork their ranks, because a spawned rank would import all modules again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_start_method
    # Exclude existing objects from garbage collection. Otherwise a collection in a fork would write to
    # these objects and thereby copy their memory.
    gc.freeze()
    # Let the kernel reap the forks, because no process waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return None


def become(called: str, handle: int, folder: str, log: str, environment: Mapping[str, str]) -> None:
    """Run the function `called` in this fork, as leader of a new process group; never return.

    `called` has the form "package.module:function". The function's argument is `handle`, the file
    descriptor of the fork's connection. Output goes to the file `log`.
    """
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        added = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in added if path and path not in sys.path]
        module, function = called.split(":")
        getattr(import_module(module), function)(handle)
        status = 0
    except BaseException:  # noqa: BLE001 - what forked it must not go on here.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _keep_start_method(method: str | None, force: bool = False) -> None:
    pass


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        serve(connection, sys.argv[2:])
