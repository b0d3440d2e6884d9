"""What the ranks of an interrupted replay have counted, handed in where they met.

A rank that is interrupted leaves at once, in the midst of rounds, so that no collective can gather
anything. Each rank puts what it has counted into the store in which the ranks met, and only then
leaves: whoever loses a peer can see there that the peer was interrupted.
"""

import time
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from .report import RankResult

COLLECT_TIMEOUT_S = 1.0
"""How long rank 0 waits for the others, which were interrupted with it or see that it has left."""
_POLL_S = 0.01
_BEGUN = "interrupted"


def hand_in(store: Store, rank: int, result: RankResult) -> None:
    """Leave the result of `rank` for rank 0, unless the store ended with the launcher."""
    with suppress(RuntimeError):
        store.set(_of_rank(rank), result.pack().hex())
        store.add(_BEGUN, 1)


def was_begun(store: Store) -> bool:
    """Say whether a rank has handed in, so that who misses it does not take it for dead."""
    try:
        return store.add(_BEGUN, 0) > 0
    except RuntimeError:
        return False


def collect(store: Store, own: RankResult, ranks: int) -> list[RankResult]:
    """Return the results of rank 0, which is `own`, and of those others that hand in in time."""
    results = [own]
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    for rank in range(1, ranks):
        with suppress(RuntimeError):
            # A wait of the store's own would print a warning when it is in vain.
            while not (come := store.check([_of_rank(rank)])) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if come:
                results.append(RankResult.unpack(bytes.fromhex(store.get(_of_rank(rank)).decode())))
    return results


def _of_rank(rank: int) -> str:
    return f"{_BEGUN}/{rank}"
