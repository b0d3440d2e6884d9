"""Selects the transport of a group according to the hosts of its ranks, and sets it up."""

import logging
from collections.abc import Sequence
from typing import Final

from ...errors import ConfigError
from ..codec import Codec
from ..collective import Collective
from ..transport import Transport
from .hierarchical import HierarchicalCollective
from .shared_memory import HostIdentity, SharedMemoryCollective, ranks_by_host
from .torch_gloo import TorchCollective

log = logging.getLogger("lockstep")

_WANTED: Final[Codec[tuple[Transport, int, HostIdentity]]] = Codec(
    tuple[Transport, int, HostIdentity]
)
"""Codec of the values that the ranks exchange: (configured transport, number of lanes, host)."""
_SHARING: dict[Transport, type[SharedMemoryCollective]] = {
    Transport.SHM: SharedMemoryCollective,
    Transport.HIERARCHICAL: HierarchicalCollective,
}


def connect(
    group: TorchCollective,
    wanted: Transport,
    *,
    lanes: int,
    timeout_s: float,
    host: HostIdentity | None = None,
) -> Collective:
    """Return the transport for rounds of `lanes` lanes between the ranks of `group`.

    Every rank of `group` must call this function. The returned transport owns `group` from then on. If
    `auto` selects shared memory and a rank cannot share memory, all ranks use `torch`. The returned
    transport's name includes the reason for the choice, and rank 0 logs it. If a configured transport
    is unavailable, `group` is closed and every rank raises the same `ConfigError`. Ranks with different
    configurations use `torch`, so that the bootstrap can report the difference. `host` overrides the
    detected host.
    """
    here = host or HostIdentity.here()
    try:
        payload = _WANTED.encode((wanted, lanes, here))
        configs = [_WANTED.decode(each) for each in group.gather(payload, timeout_s)]
        collective: Collective = group
        if all(each[:2] == configs[0][:2] for each in configs):
            identities = [identity for _, _, identity in configs]
            collective = _connect(group, wanted, identities, lanes=lanes, timeout_s=timeout_s)
    except BaseException:
        group.close()
        raise
    if not collective.rank:
        log.info(
            "rounds of %d ranks use the transport %s", collective.world_size, collective.transport
        )
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
        picked, why = wanted, f"as configured; {why}"
    collective: Collective = group
    try:
        if picked in _SHARING:
            create = _SHARING[picked].create
            collective = create(group, identities, lanes=lanes, timeout_s=timeout_s)
    except ConfigError as error:
        if wanted is not Transport.AUTO:
            raise
        picked, why = Transport.TORCH, str(error)
    collective.transport = f"{picked}: {why}"
    return collective


def pick(hosts: Sequence[tuple[int, ...]]) -> tuple[Transport, str]:
    """Return the transport that `auto` selects for ranks on these hosts, paired with the reason."""
    ranks = sum(len(each) for each in hosts)
    if ranks == 1:
        return Transport.SHM, "there is one rank"
    if len(hosts) == 1:
        return Transport.SHM, f"all {ranks} ranks are on one host"
    if len(hosts) < ranks:
        return Transport.HIERARCHICAL, f"{ranks} ranks are on {len(hosts)} hosts"
    return (
        Transport.TORCH,
        f"each of {ranks} ranks is on a separate host or in a separate container",
    )
