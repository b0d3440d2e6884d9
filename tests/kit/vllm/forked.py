"""Runs engines of one rank, one after the other, each in a fork of a process that has loaded vLLM.

The command line names the files of their plans; what came of each stands in a folder of its plan's
name. An engine starts in a third of the time that it takes in a process of its own. One that fails
leaves no result, and says why in its log.
"""

import os
import socket
import sys
import traceback
from pathlib import Path

from tests.kit.vllm.plan import read_plan, write
from tests.kit.vllm.rank import run

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def carry_out(path: Path) -> None:
    """Run a plan in this process, with its output in a log beside the result."""
    folder = path.with_suffix("")
    folder.mkdir()
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    os.environ.update(ALONE, MASTER_PORT=str(free_port()))
    write(folder / "rank0.json", run(read_plan(path), 0, 1))


def main() -> None:
    """Run the plans that the command line names."""
    for name in sys.argv[1:]:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            carry_out(Path(name))
        except BaseException:  # noqa: BLE001 - the log is all that is left of it.
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
