"""The transport for ranks of several hosts: shared memory inside a host, one rank of each between them.

In the first rank of each host a courier waits until all ranks of its host have written their lanes,
folds them, exchanges the result with the other couriers, and writes what all hosts came to into a
cell of its own, where every rank of the host finds it. So a host takes part with one vector, however
many ranks it has, and a pipelined round comes back while its ranks compute.

How a host's group has ended travels in one lane more, so that ranks of other hosts raise the same
error: a courier whose host has ended joins the next exchange with the news instead of lanes.

Two things no protocol can help, and neither does harm, since the epoch is over on every rank at most
one round later, and no rank goes on from where it was:

- A courier that dies, stops or closes after an exchange and before it has written the result leaves
  its host without a round that the other hosts have. Those end in the round after it.
- Only a courier can tell the other hosts which rank was lost. Of its own rank they say that one of
  another host was.

A process that a host's first rank has forked holds gloo's connections open. If that rank dies, its
own host notices at once, and the others at their deadlines.
"""

import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Self

import numpy as np

from ...errors import CollectiveTimeout, GroupError
from ..collective import Collective, Vector
from ..transport import Transport
from .ending import Ending, EndingCause
from .shared_memory import (
    SLICE_S,
    HostGroup,
    HostIdentity,
    SharedMemoryCollective,
    ranks_by_host,
)
from .torch_gloo import TorchCollective

NEWS_S = 0.5
"""How much longer than its deadline a host waits for the others, if all its own ranks have come: one
of those may be about to say which rank was late."""

_JOIN_S = 1.0
"""How long `close` waits for the courier, which checks for it many times within that."""

_NEWS_GO_S = 0.1
"""How long `close` waits until the other couriers have the news. Those that wait for an exchange get it
at once; the group of an exchange that is left pending would have to be kept."""

_NOTHING = np.iinfo(np.int64).max
"""A lane that is never the minimum."""

log = logging.getLogger("lockstep")


class HierarchicalCollective(SharedMemoryCollective):
    """The rounds of a group whose ranks are on several hosts; see `Collective`."""

    def __init__(self, group: Collective, host: HostGroup, courier: "_Courier | None") -> None:
        """Use `create`. The first rank of a host has the courier."""
        said_by = len(host.ranks)
        result = host.cells.span(said_by, said_by + 1)
        super().__init__(group, host, Transport.HIERARCHICAL, result, NEWS_S)
        self._courier = courier

    @classmethod
    def create(
        cls, group: Collective, identities: Sequence[HostIdentity], *, lanes: int, timeout_s: float
    ) -> Self:
        """Set up shared memory on each host, and a gloo group of the hosts' first ranks.

        Collective over `group`, which is used to meet, and later for gatherings, and is closed with
        this transport. `timeout_s` bounds the meeting, and each exchange between hosts, so it must not
        be less than what a round may take. The transport ends with the main thread of each host's
        first rank, whichever thread uses it. Raises the same `ConfigError` on every rank if
        the ranks of some host cannot share memory; the group is as it was then.
        """
        hosts = ranks_by_host(identities)
        host = HostGroup.meet(group, hosts, lanes=lanes, extra_writers=1, timeout_s=timeout_s)
        courier: _Courier | None = None
        try:
            name = group.gather(secrets.token_hex(16).encode(), timeout_s)[0].decode()
            if not host.me:
                leaders = [ranks[0] for ranks in hosts]
                between = TorchCollective.among(leaders, group.rank, name, timeout_s=timeout_s)
                courier = _Courier(host, between, group.rank)
            # Nobody goes on before the hosts are connected.
            group.gather(b"", timeout_s)
        except BaseException:
            if courier is not None:
                courier.close()
            host.close()
            raise
        return cls(group, host, courier)

    def leave(self, host: HostGroup) -> None:
        """See `SharedMemoryCollective`. A courier knows which round was the last that all have."""
        if self._courier is None:
            super().leave(host)
        else:
            self._courier.close()


class _Courier:
    """Speaks for a host: a thread of its first rank, which ends with that rank's main thread.

    It ends when the group does, and does not wait for that to be read.
    """

    def __init__(self, host: HostGroup, between: TorchCollective, rank: int) -> None:
        self._host = host
        self._between = between
        self._rank = rank
        self._closing = False
        # No daemon: one that is in torch when the interpreter ends would abort the process.
        self._thread = threading.Thread(target=self._run, name="lockstep-courier")
        self._thread.start()

    def close(self) -> None:
        """Leave the group: end the thread, which tells the others, and the exchange between hosts."""
        self._closing = True
        try:
            self._host.cells.wake_all()
            self._thread.join(_JOIN_S)
            self._between.came_back(_NEWS_GO_S)
        finally:
            self._between.close()

    def _run(self) -> None:
        number = 1
        try:
            while self._carry(number):
                number += 1
        except CollectiveTimeout:
            self._host.end(EndingCause.LATE_ELSEWHERE, self._rank, number - 1)
        except GroupError:
            self._host.end(EndingCause.LOST_ELSEWHERE, self._rank, number - 1)
            # Gloo does not pass the news on: whoever hears of it closes its connections, too.
            self._between.close()
        except BaseException:
            log.exception("the courier of rank %d failed in round %d", self._rank, number)
            self._host.end(EndingCause.FAILED, self._rank, number - 1)
            self._between.close()

    def _carry(self, number: int) -> bool:
        """Bring one round about; False if none will follow."""
        host, lanes = self._host, self._host.cells.lanes
        said = np.full(lanes + 1, _NOTHING)
        folded = self._gather(number)
        if folded is None:
            ended = host.ended_before(number)
            if ended is not None:
                # The last exchange. The others may come to it later, also when this thread is gone.
                said[lanes] = -ended.word
                self._between.launch(said)
            return False
        said[:lanes] = folded
        between = self._between.launch(said)
        while not between.came_back(SLICE_S):
            if self._over(number):
                return False
        folded = between.wait(0.0)
        if folded[lanes] < 0:
            ended = Ending.of(-int(folded[lanes]))
            host.end(ended.cause, ended.rank, ended.last_round)
            return False
        host.cells.write(len(host.ranks), number, folded[:lanes])
        return True

    def _gather(self, number: int) -> Vector | None:
        """Wait for the fold of what this host's ranks say in a round; None if it is over."""
        host = self._host
        while not self._over(number):
            folded = host.look(host.here, number, SLICE_S)
            if folded is not None:
                return folded
        return None

    def _over(self, number: int) -> bool:
        """Say whether this round will not come about any more; leave if this rank is closing.

        A rank whose main thread has ended launches no more rounds, and counts as closing.
        """
        if self._closing or not threading.main_thread().is_alive():
            self._host.end(EndingCause.LEFT, self._rank, number - 1)
        return self._host.ended_before(number) is not None
