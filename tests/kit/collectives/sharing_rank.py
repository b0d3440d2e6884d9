"""A rank of a group that shares memory, as a program that ends in one way or another.

    sharing_rank.py RANK STORE TRANSPORT ENDING TIMEOUT_S

There are two ranks, on a host each if the transport is the hierarchical one. Rank 0 prints a line
when the first round is over, and then ends as told, without closing its transport. Rank 1 prints what
ends the next round.
"""

import signal
import sys
import threading
from functools import partial

import numpy as np

from lockstep.errors import GroupError
from tests.kit.ranks.as_processes import Build, Member, over_gloo, over_hosts, over_shared_memory

BUILDS: dict[str, Build] = {
    "shm": partial(over_shared_memory, lanes=4),
    "hierarchical": partial(over_hosts, 1, lanes=4),
}


def main() -> None:
    rank, store, transport, ending = int(sys.argv[1]), *sys.argv[2:5]
    timeout_s = float(sys.argv[5])
    signal.alarm(int(timeout_s))
    collective = BUILDS[transport](over_gloo(Member(rank, 2, store, ())))
    lanes = np.zeros(4, dtype=np.int64)
    collective.launch(lanes).wait(timeout_s)
    say("met")
    if rank:
        try:
            collective.launch(lanes).wait(timeout_s)
        except GroupError as error:
            say(type(error).__name__)
        return
    if ending == "raise":
        raise RuntimeError("raised by the test")
    if ending == "exit":
        sys.exit(7)
    if ending == "pending":
        collective.launch(lanes)
    if ending == "linger":
        threading.Thread(target=sys.stdin.read).start()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
