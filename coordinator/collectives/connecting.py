"""Which transport carries the rounds of a group, by the hosts that its ranks are on."""

import logging
from collections.abc import Sequence

import msgpack

from ...errors import ConfigError
from .base import Collective, Transport
from .hierarchical import HierarchicalCollective
from .host_group import Place, ranks_by_place
from .shared_memory import SharedMemoryCollective
from .torch_gloo import TorchCollective

log = logging.getLogger("lockstep")


def connect(
    group: TorchCollective,
    wanted: Transport,
    *,
    lanes: int,
    timeout_s: float,
    place: Place | None = None,
) -> Collective:
    """Return the transport for rounds of `lanes` lanes between the ranks of `group`.

    Collective over the group, which belongs to the transport from now on. Where `auto` would share
    memory and a rank cannot, all use `torch`. Which it is and why is in `transport`, and logged by
    rank 0. Raises the same `ConfigError` on every rank, and closes the group, if the one that is
    wanted by name cannot be had. Ranks that want different things use `torch`, over which the
    bootstrap will name the difference. `place` is where this rank says that it is.
    """
    here = place or Place.here()
    payload: bytes = msgpack.packb([wanted.value, lanes, here.boot, here.processes])
    try:
        said = [msgpack.unpackb(each) for each in group.gather(payload, timeout_s)]
        collective: Collective = group
        if all(each[:2] == said[0][:2] for each in said):
            places = [Place(boot, processes) for _, _, boot, processes in said]
            collective = _connect(group, wanted, places, lanes=lanes, timeout_s=timeout_s)
    except BaseException:
        group.close()
        raise
    if not collective.rank:
        log.info("rounds of %d ranks go over %s", collective.world_size, collective.transport)
    return collective


def _connect(
    group: TorchCollective,
    wanted: Transport,
    places: Sequence[Place],
    *,
    lanes: int,
    timeout_s: float,
) -> Collective:
    picked, why = wanted, "as configured"
    if wanted is Transport.AUTO:
        picked, why = pick(ranks_by_place(places))
    try:
        match picked:
            case Transport.SHM:
                collective: Collective = SharedMemoryCollective.create(
                    group, places, lanes=lanes, timeout_s=timeout_s
                )
            case Transport.HIERARCHICAL:
                collective = HierarchicalCollective.create(
                    group, places, lanes=lanes, timeout_s=timeout_s
                )
            case _:
                collective = group
    except ConfigError as error:
        if wanted is not Transport.AUTO:
            raise
        collective, picked, why = group, Transport.TORCH, str(error)
    collective.transport = f"{picked}: {why}"
    return collective


def pick(hosts: Sequence[tuple[int, ...]]) -> tuple[Transport, str]:
    """Return what `auto` means for ranks on these hosts, and why."""
    ranks = sum(len(each) for each in hosts)
    if len(hosts) == 1:
        return Transport.SHM, f"all {ranks} ranks are on one host" if ranks > 1 else "one rank"
    if len(hosts) < ranks:
        return Transport.HIERARCHICAL, f"{ranks} ranks are on {len(hosts)} hosts"
    return Transport.TORCH, f"each of {ranks} ranks is on a host of its own"
