"""The choice of the transport of a group, by the hosts that its ranks are on."""

import logging
from collections.abc import Sequence
from typing import Final

from ...errors import ConfigError
from ..codec import Codec
from ..collective import Collective, Transport
from .hierarchical import HierarchicalCollective
from .shared_memory import HostIdentity, SharedMemoryCollective, ranks_by_host
from .torch_gloo import TorchCollective

log = logging.getLogger("lockstep")

_WANTED: Final[Codec[tuple[Transport, int, HostIdentity]]] = Codec(
    tuple[Transport, int, HostIdentity]
)
"""The transport that a rank wants, its number of lanes, and its host."""


def connect(
    group: TorchCollective,
    wanted: Transport,
    *,
    lanes: int,
    timeout_s: float,
    host: HostIdentity | None = None,
) -> Collective:
    """Return the transport for rounds of `lanes` lanes between the ranks of `group`.

    Collective over the group, which belongs to the transport from now on. Where `auto` would share
    memory and a rank cannot, all use `torch`. Its `transport` says which it is and why, and rank 0
    logs that. Raises the same `ConfigError` on every rank, and closes the group, if the one that is
    wanted by name cannot be had. Ranks that want different things use `torch`, over which the
    bootstrap will name the difference. `host` is where this rank says that it is.
    """
    here = host or HostIdentity.here()
    try:
        payload = _WANTED.encode((wanted, lanes, here))
        said = [_WANTED.decode(each) for each in group.gather(payload, timeout_s)]
        collective: Collective = group
        if all(each[:2] == said[0][:2] for each in said):
            identities = [identity for _, _, identity in said]
            collective = _connect(group, wanted, identities, lanes=lanes, timeout_s=timeout_s)
    except BaseException:
        group.close()
        raise
    if not collective.rank:
        log.info("rounds of %d ranks go over %s", collective.world_size, collective.transport)
    return collective


def _connect(
    group: TorchCollective,
    wanted: Transport,
    identities: Sequence[HostIdentity],
    *,
    lanes: int,
    timeout_s: float,
) -> Collective:
    hosts = ranks_by_host(identities)
    picked, why = pick(hosts)
    if wanted is not Transport.AUTO:
        picked, why = wanted, f"as configured; {_hosts_in_words(hosts)}"
    try:
        match picked:
            case Transport.SHM:
                collective: Collective = SharedMemoryCollective.create(
                    group, identities, lanes=lanes, timeout_s=timeout_s
                )
            case Transport.HIERARCHICAL:
                collective = HierarchicalCollective.create(
                    group, identities, lanes=lanes, timeout_s=timeout_s
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
        return Transport.SHM, _hosts_in_words(hosts)
    if len(hosts) < ranks:
        return Transport.HIERARCHICAL, _hosts_in_words(hosts)
    return Transport.TORCH, _hosts_in_words(hosts)


def _hosts_in_words(hosts: Sequence[tuple[int, ...]]) -> str:
    ranks = sum(len(each) for each in hosts)
    if ranks == 1:
        return "there is one rank"
    if len(hosts) == 1:
        return f"all {ranks} ranks are on one host"
    if len(hosts) < ranks:
        return f"{ranks} ranks are on {len(hosts)} hosts"
    return f"each of {ranks} ranks is on a host, or in a container, of its own"
