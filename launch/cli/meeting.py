"""How ranks come together: the store in which they meet, and the group that they join there.

It outlives the ranks that use it where a launcher hosts it, so that everything in it has a prefix.
"""

import ipaddress
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...coordinator.collectives.torch_gloo import TorchCollective
from ...errors import PeerLost
from .environment import RankEnvironment, address_towards, choose_interface

JOIN_TIMEOUT_S = 180.0
"""How long the ranks wait for each other before the first round."""


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
    return of_attempt(store, environment.attempt)


def of_attempt(store: Store, attempt: int = 0) -> Store:
    """Return the part of a store in which the ranks of one attempt meet."""
    return PrefixStore(f"lockstep/attempt-{attempt}", store)


@contextmanager
def joined(
    environment: RankEnvironment, store: Store, *, timeout_s: float
) -> Generator[TorchCollective]:
    """Join the ranks that meet in `store` into a group, and leave it at the end, in peace or not.

    `timeout_s` is what a round may take.
    """
    address = address_towards(environment.master_addr, environment.master_port)
    if not ipaddress.ip_address(address).is_loopback:
        choose_interface(address)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        )
    except RuntimeError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise PeerLost(
            f"rank {environment.rank} could not join the others within {JOIN_TIMEOUT_S:.0f} s: {why}"
        ) from error
    try:
        # The start has a deadline of its own, and gloo's bound must not end it, nor a round.
        collective = TorchCollective.create(timeout_s=max(timeout_s, JOIN_TIMEOUT_S))
        try:
            yield collective
        finally:
            collective.close()
    finally:
        dist.destroy_process_group()


def _tcp_store(host: str, port: int, *, hosting: bool, timeout_s: float) -> Store:
    # torch's stubs do not export the class that its documentation names.
    return dist.TCPStore(  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        is_master=hosting,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
