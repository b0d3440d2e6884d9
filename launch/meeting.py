"""The store in which the ranks meet before they have a group.

It outlives the ranks that use it where a launcher hosts it, so that everything in it has a prefix.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import PeerLost
from .environment import RankEnvironment


def host_store(host: str, *, timeout_s: float) -> tuple[Store, int]:
    """Serve a store at `host` on a port that the system chooses; return both.

    The store is gone when the object is. Does not wait for anybody.
    """
    store = _tcp_store(host, 0, hosting=True, timeout_s=timeout_s)
    return store, int(store.port)  # type: ignore[attr-defined]


def meet(environment: RankEnvironment, *, timeout_s: float) -> Store:
    """Return the store at the master address, under a prefix of this attempt.

    Rank 0 serves it unless the launcher does, as long as it keeps the object. Raises `PeerLost` if it
    does not answer in time; `timeout_s` bounds each later wait in it too.
    """
    hosting = environment.rank == 0 and not environment.store_is_hosted
    address = (environment.master_addr, environment.master_port)
    try:
        store = _tcp_store(*address, hosting=hosting, timeout_s=timeout_s)
    except RuntimeError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise PeerLost(
            f"rank {environment.rank} finds no store at {address[0]}:{address[1]}: {why}"
        ) from error
    return of_attempt(store, environment)


def of_attempt(store: Store, environment: RankEnvironment) -> Store:
    """Return the part of a store in which the ranks of one attempt meet."""
    return PrefixStore(f"lockstep/attempt-{environment.attempt}", store)


def _tcp_store(host: str, port: int, *, hosting: bool, timeout_s: float) -> Store:
    # torch's stubs do not export the class that its documentation names.
    return dist.TCPStore(  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        is_master=hosting,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
