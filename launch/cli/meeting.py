"""How ranks come together: the store in which they meet, and the group that they join there."""

import ipaddress
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import (
    rendezvous,  # pyright: ignore[reportUnknownVariableType] - its `kwargs` has no type.
)

from ...coordinator.collectives.torch_gloo import TorchCollective
from ...errors import PeerLost
from .environment import RankEnvironment, address_towards, choose_interface

JOIN_TIMEOUT_S = 180.0
"""How long the ranks wait for each other before the first round."""


class Meeting(NamedTuple):
    """What joins the ranks: the store in which they met, and what carries collectives."""

    store: Store
    collective: TorchCollective


@contextmanager
def joined(environment: RankEnvironment, *, timeout_s: float) -> Generator[Meeting]:
    """Join the ranks of the group that the environment names; leave it at the end, in peace or not.

    `timeout_s` is what a round may take. Raises `PeerLost` if the ranks do not come together in time.
    """
    address = address_towards(environment.master_addr, environment.master_port)
    if not ipaddress.ip_address(address).is_loopback:
        choose_interface(address)
    join_timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        # As `init_process_group` does by itself, which keeps the store to itself.
        store, rank, world_size = next(rendezvous("env://", timeout=join_timeout))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=join_timeout
        )
    except RuntimeError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise PeerLost(
            f"rank {environment.rank} could not join the others at {environment.master_addr}:"
            f"{environment.master_port} within {JOIN_TIMEOUT_S:.0f} s: {why}"
        ) from error
    try:
        # The start has a deadline of its own, and gloo's bound must not end it, nor a round.
        collective = TorchCollective.create(timeout_s=max(timeout_s, JOIN_TIMEOUT_S))
        try:
            yield Meeting(store, collective)
        finally:
            collective.close()
    finally:
        dist.destroy_process_group()
