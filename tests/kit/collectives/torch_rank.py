"""One of two ranks, as a program: rank 0 launches a round to which rank 1 never comes, and ends.

    torch_rank.py RANK STORE ENDING TIMEOUT_S

Rank 0 prints a line when the round is pending, and one if it is interrupted while it waits. Rank 1
stays until its standard input closes.
"""

import gc
import os
import signal
import sys
import threading
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from lockstep.coordinator.collectives.torch_gloo import TorchCollective


def main() -> None:
    rank, store, ending, timeout_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
    )
    collective = TorchCollective.create(timeout_s=timeout_s)
    collective.launch(np.zeros(4, dtype=np.int64)).wait(timeout_s)
    if rank:
        sys.stdin.read()
        return
    signal.alarm(int(timeout_s))
    pending = collective.launch(np.zeros(4, dtype=np.int64))
    say("pending")
    if ending == "close":
        collective.close()
    elif ending == "destroy_default":
        dist.destroy_process_group()
        collective.close()
    elif ending == "collect":
        del collective, pending
        gc.collect()
    elif ending == "wait":
        try:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            pending.wait(timeout_s)
        except KeyboardInterrupt:
            say("interrupted")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
