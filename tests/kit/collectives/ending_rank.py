"""A program that runs one rank of a group of two. The rank ends without closing its transport.

    ending_rank.py RANK STORE TRANSPORT ENDING TIMEOUT_S

The hierarchical transport treats the two ranks as ranks on two hosts. Both ranks print a line after the
first round. Rank 0 then ends as ENDING says; some endings first launch a second round. Over gloo, rank
1 launches no second round and waits until its standard input closes. Over other transports, rank 1 runs
a second round and prints its error.
"""

import gc
import signal
import sys
import threading
from functools import partial

import torch.distributed as dist

from lockstep.errors import GroupError
from tests.kit.collectives.contract import lanes_of
from tests.kit.ranks.as_processes import BUILDS, Member, over_gloo, over_hosts

OVER = BUILDS | {"hierarchical": partial(over_hosts, 1)}


def main() -> None:
    rank, store, transport, ending = int(sys.argv[1]), *sys.argv[2:5]
    timeout_s = float(sys.argv[5])
    signal.alarm(int(timeout_s))
    collective = OVER[transport](over_gloo(Member(rank, 2, store, ())))
    collective.launch(lanes_of(0)).wait(timeout_s)
    say("met")
    if rank and transport == "torch":
        sys.stdin.read()
    elif rank:
        try:
            collective.launch(lanes_of(0)).wait(timeout_s)
        except GroupError as error:
            say(type(error).__name__)
    elif ending == "raise":
        raise RuntimeError("raised by the test")
    elif ending == "exit":
        sys.exit(7)
    elif ending == "linger":
        threading.Thread(target=sys.stdin.read).start()
    elif ending != "return":
        pending = collective.launch(lanes_of(0))
        if ending == "destroy_default":
            dist.destroy_process_group()
        if ending in ("close", "destroy_default"):
            collective.close()
        if ending == "collect":
            del collective, pending
            gc.collect()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
