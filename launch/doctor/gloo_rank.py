"""One of the two processes that try gloo: `python -m lockstep.launch.doctor.gloo_rank LAUNCHER`."""

import json
import sys
import time
from typing import Final

import torch
import torch.distributed as dist

from ..cli.environment import read_rank_environment
from ..cli.interruption import end_with
from ..cli.meeting import joined, meet
from .network import GLOO_TIMEOUT_S

LANES: Final = 64
WARMING: Final = 20
TIMED: Final = 200


def main() -> None:
    """Meet the other one, vote, and let rank 0 leave how long it took where they met."""
    end_with(int(sys.argv[1]))
    environment = read_rank_environment()
    store = meet(environment, timeout_s=GLOO_TIMEOUT_S)
    torch.set_num_threads(1)
    with joined(environment, store, timeout_s=GLOO_TIMEOUT_S):
        lanes = torch.zeros(LANES, dtype=torch.int64)
        took: list[float] = []
        for _ in range(WARMING + TIMED):
            began = time.perf_counter()
            dist.all_reduce(lanes, op=dist.ReduceOp.MIN)
            took.append((time.perf_counter() - began) * 1e6)
        timed = sorted(took[WARMING:])
        if environment.rank == 0:
            found = {"p50_us": timed[TIMED // 2], "p99_us": timed[TIMED * 99 // 100]}
            store.set("gloo", json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main()
