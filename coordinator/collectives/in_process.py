"""The in-process transport: all ranks are threads of one process, or take turns in one thread.

It is the reference for tests and simulation. In a single thread every rank launches before any rank
waits, so no wait blocks.
"""

import threading
from dataclasses import dataclass, field

from ...errors import CollectiveTimeout, GroupError, PeerLost, UsageError
from ..collective import CommonStore, Vector
from ..lanes import fold


@dataclass(slots=True)
class _Exchange:
    """A round or gather in progress: each rank's value, and how many ranks received all values."""

    given: dict[int, Vector | bytes] = field(default_factory=dict[int, Vector | bytes])
    received: int = 0


class InProcessGroup:
    """A group of `world_size` ranks that exchange vectors through this object's memory."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._exchanges: dict[tuple[str, int], _Exchange] = {}
        self._gone: set[int] = set()
        self.values: dict[str, bytes] = {}
        """The values of all stores of this group; see `Collective.common_store`."""

    def member(self, rank: int) -> "InProcessCollective":
        """Return the transport of one rank. Call once for each rank."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not in a group of {self.world_size}")
        return InProcessCollective(self, rank)

    def give(self, key: tuple[str, int], rank: int, value: Vector | bytes) -> None:
        """Add the value of `rank` to the exchange `key`, which is a round or a gather."""
        with self._changed:
            if rank in self._gone:
                raise PeerLost(f"rank {rank} has left the group")
            self._exchanges.setdefault(key, _Exchange()).given[rank] = value
            self._changed.notify_all()

    def receive(self, key: tuple[str, int], timeout_s: float) -> list[Vector | bytes]:
        """Wait until all ranks have added their values to an exchange; return the values by rank."""
        with self._changed:
            exchange = self._exchanges[key]

            def is_over() -> bool:
                return len(exchange.given) == self.world_size or bool(
                    self._gone - exchange.given.keys()
                )

            self._changed.wait_for(is_over, timeout_s)
            missing = sorted(set(range(self.world_size)) - exchange.given.keys())
            lost = [rank for rank in missing if rank in self._gone]
            if lost:
                raise PeerLost(f"rank {lost[0]} has left the group")
            if missing:
                raise CollectiveTimeout(
                    f"rank {missing[0]} did not join {key[0]} {key[1]} within {timeout_s} s"
                )
            exchange.received += 1
            if exchange.received == self.world_size:
                del self._exchanges[key]
            return [exchange.given[rank] for rank in range(self.world_size)]

    def leave(self, rank: int) -> None:
        """Record that `rank` has left: an exchange that it has not joined fails on the other ranks."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class MemoryStore:
    """A key-value store within one process; see `CommonStore`."""

    def __init__(self, values: dict[str, bytes], name: str = "") -> None:
        """Keep entries in `values` under keys that begin with `name`; stores may share the dict."""
        self._values = values
        self._name = name

    def set(self, key: str, value: bytes) -> None:
        self._values[f"{self._name}/{key}"] = value

    def get(self, key: str) -> bytes:
        return self._values[f"{self._name}/{key}"]

    def delete_key(self, key: str) -> bool:
        return self._values.pop(f"{self._name}/{key}", None) is not None


class InProcessCollective:
    """One rank's side of an `InProcessGroup`; see `Collective`.

    The object is also the `PendingRound` that `launch` returns.
    """

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self.transport: str = "in process"
        self.launches = 0
        self._gathers = 0
        self._group = group
        self._broken_by: GroupError | None = None

    def launch(self, lanes: Vector) -> "InProcessCollective":
        self.launches += 1
        self._give(("round", self.launches), lanes)
        return self

    def wait(self, timeout_s: float) -> Vector:
        given = self.receive(("round", self.launches), timeout_s)
        return fold([vector for vector in given if not isinstance(vector, bytes)])

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        self._gathers += 1
        key = ("gather", self._gathers)
        self._give(key, payload)
        return [each for each in self.receive(key, timeout_s) if isinstance(each, bytes)]

    def receive(self, key: tuple[str, int], timeout_s: float) -> list[Vector | bytes]:
        """Wait for an exchange and return its values. After a failure, later exchanges fail as well."""
        try:
            return self._group.receive(key, timeout_s)
        except GroupError as error:
            self._broken_by = error
            raise

    def common_store(self, name: str) -> CommonStore:
        return MemoryStore(self._group.values, name)

    def _give(self, key: tuple[str, int], value: Vector | bytes) -> None:
        if self._broken_by is not None:
            raise self._broken_by.with_traceback(None)
        self._group.give(key, self.rank, value)

    def close(self) -> None:
        self._group.leave(self.rank)
