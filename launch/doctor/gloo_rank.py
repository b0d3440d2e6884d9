"""One of two processes that test gloo: `python -m lockstep.launch.doctor.gloo_rank LAUNCHER FILE`.

LAUNCHER is the process id of the parent; FILE receives the measured times.
"""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ...errors import LockstepError, PeerLost
from ..cli.environment import read_rank_environment
from ..cli.interruption import end_with
from ..cli.meeting import joined
from ..cli.rank_processes import RankErrors
from .network import GLOO_TIMEOUT_S

LANES: Final = 64
WARMING: Final = 20
TIMED: Final = 200


def main() -> None:
    """Join the other process, and time gloo's all_reduce; rank 0 writes the times to FILE."""
    launcher = int(sys.argv[1])
    end_with(launcher)
    signal.alarm(GLOO_TIMEOUT_S)
    try:
        record(_try, RankErrors(launcher))()
    except LockstepError:
        sys.exit(1)


def _try() -> None:
    try:
        _vote()
    except RuntimeError as error:
        raise PeerLost(str(error).partition("\n")[0]) from error


def _vote() -> None:
    environment = read_rank_environment()
    torch.set_num_threads(1)
    with joined(environment, timeout_s=GLOO_TIMEOUT_S):
        lanes = torch.zeros(LANES, dtype=torch.int64)
        took: list[float] = []
        for _ in range(WARMING + TIMED):
            began = time.perf_counter()
            dist.all_reduce(lanes, op=dist.ReduceOp.MIN)
            took.append((time.perf_counter() - began) * 1e6)
        timed = sorted(took[WARMING:])
        if environment.rank == 0:
            found = {"p50_us": timed[TIMED // 2], "p99_us": timed[TIMED * 99 // 100]}
            Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()


if __name__ == "__main__":
    main()
