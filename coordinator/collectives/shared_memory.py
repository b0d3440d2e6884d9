"""The transport for ranks of one host: each writes its lanes to shared memory and folds those of all.

It sends no message, and its only system call is the one that wakes a sleeper. Rounds that a rank has
launched come back without its help, so a pipelined one is there when it is asked for.
"""

from collections.abc import Sequence
from typing import Self

from ...errors import ConfigError
from ..collective import Collective, Transport
from .host_group import HostGroup, HostIdentity, ranks_by_host
from .sharing import SharingCollective


class SharedMemoryCollective(SharingCollective):
    """The rounds of a group whose ranks are all on one host; see `Collective`."""

    @classmethod
    def create(
        cls, group: Collective, identities: Sequence[HostIdentity], *, lanes: int, timeout_s: float
    ) -> Self:
        """Set up shared memory for rounds of `lanes` lanes; collective over `group`.

        `identities` has the host of each rank. The group is used to meet, and later for gatherings,
        and is closed with this transport. Raises the same `ConfigError` on every rank if they cannot
        share memory; the group is as it was then.
        """
        hosts = ranks_by_host(identities)
        if len(hosts) > 1:
            raise ConfigError(
                f"the transport shm needs all ranks on one host, and {_described(hosts)};"
                " use hierarchical or auto"
            )
        host = HostGroup.meet(group, hosts, lanes=lanes, timeout_s=timeout_s)
        return cls(group, host, Transport.SHM, host.here, 0.0)


def _described(hosts: Sequence[tuple[int, ...]]) -> str:
    named = " | ".join(", ".join(map(str, ranks)) for ranks in hosts)
    return f"there are {len(hosts)}: {named}"
