"""The transport for ranks of one host: each writes its lanes to shared memory and folds those of all.

No message and no system call but the one that wakes who sleeps. Rounds that a rank has launched come
back without its help, so a pipelined one is there when it is asked for.
"""

from collections.abc import Sequence
from typing import Self

from ...errors import ConfigError, GroupError, PeerLost
from ..fold import fold
from .base import Collective, Transport, Vector
from .host_group import HostGroup, Place, ranks_by_place


class _SharedRound:
    def __init__(self, collective: "SharedMemoryCollective", number: int) -> None:
        self._collective = collective
        self._number = number

    def wait(self, timeout_s: float) -> Vector:
        """See `PendingRound`."""
        return self._collective.finish(self._number, timeout_s)


class SharedMemoryCollective:
    """The rounds of a group whose ranks are all on one host; see `Collective`."""

    def __init__(self, group: Collective, host: HostGroup) -> None:
        """Use `create`."""
        self.rank = group.rank
        self.world_size = group.world_size
        self.transport: str = Transport.SHM.value
        self.launches = 0
        self._group = group
        self._host: HostGroup | None = host
        self._broken_by: GroupError | None = None

    @classmethod
    def create(
        cls, group: Collective, places: Sequence[Place], *, lanes: int, timeout_s: float
    ) -> Self:
        """Set up shared memory for rounds of `lanes` lanes; collective over `group`.

        `places` are those of all ranks. The group is used to meet, and later for gatherings, and is
        closed with this transport. Raises the same `ConfigError` on every rank if they cannot share
        memory; the group is as it was then.
        """
        hosts = ranks_by_place(places)
        if len(hosts) > 1:
            raise ConfigError(
                f"the transport shm needs all ranks on one host, and {_described(hosts)};"
                " use hierarchical or auto"
            )
        return cls(group, HostGroup.meet(group, hosts, lanes=lanes, timeout_s=timeout_s))

    def launch(self, lanes: Vector) -> _SharedRound:
        """See `Collective`."""
        host = self._joined()
        host.write(self.launches + 1, lanes)
        self.launches += 1
        return _SharedRound(self, self.launches)

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """See `Collective`."""
        self._joined()
        try:
            return self._group.gather(payload, timeout_s)
        except GroupError as error:
            self._broken_by = error
            raise

    def finish(self, number: int, timeout_s: float) -> Vector:
        """Wait for a round that was launched; if it fails, so does every later call."""
        host = self._joined()
        try:
            return fold(host.wait(number, 0, self.world_size, timeout_s))
        except GroupError as error:
            self._broken_by = error
            raise

    def close(self) -> None:
        """See `Collective`."""
        host, self._host = self._host, None
        if host is not None:
            host.leave(self.launches)
            host.close()
        self._group.close()

    def _joined(self) -> HostGroup:
        if self._broken_by is not None:
            raise self._broken_by
        if self._host is None:
            raise PeerLost("this rank has left the group")
        return self._host


def _described(hosts: Sequence[tuple[int, ...]]) -> str:
    named = " | ".join(", ".join(map(str, ranks)) for ranks in hosts)
    return f"there are {len(hosts)}: {named}"
