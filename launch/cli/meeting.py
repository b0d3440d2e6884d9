"""Rendezvous of the ranks: torch's key-value store, and the process group that the ranks join."""

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
"""Seconds that ranks wait for each other to join, before the first round."""


class Meeting(NamedTuple):
    """torch's rendezvous store, and the collective transport of the ranks that joined."""

    store: Store
    collective: TorchCollective


@contextmanager
def joined(environment: RankEnvironment, *, timeout_s: float) -> Generator[Meeting]:
    """Join the process group that the environment names, and leave it when the context exits.

    `timeout_s` is the timeout of a round. Raises `PeerLost` if the ranks do not join within
    `JOIN_TIMEOUT_S`.
    """
    address = address_towards(environment.master_addr, environment.master_port)
    if not ipaddress.ip_address(address).is_loopback:
        choose_interface(address)
    join_timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        # Create torch's rendezvous store here, because `init_process_group` does not return the store
        # that it creates.
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
        # Give gloo the longer of the two timeouts. Joining and rounds have their own deadlines, and
        # gloo must not time out before these deadlines.
        collective = TorchCollective.create(timeout_s=max(timeout_s, JOIN_TIMEOUT_S))
        try:
            yield Meeting(store, collective)
        finally:
            collective.close()
    finally:
        dist.destroy_process_group()
