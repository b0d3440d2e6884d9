"""Transport for ranks on several hosts: shared memory inside a host, gloo between host leaders.

The first rank of each host is its leader. The leader's thread waits until all ranks of the host have
written their lanes, folds them, exchanges the result with the other host leaders, and writes the global
fold to a cell that the host's ranks read. Each host thus sends one vector, and a pipelined round
completes while the ranks compute.

One additional lane carries the ending (terminal error) of a host's ranks. A leader whose host has ended
its rounds joins the next exchange with the ending instead of lanes, so that ranks of other hosts raise
the same error.

Two cases cannot be avoided. They are harmless, because the epoch ends on every rank at most one round
later:

- If a host leader dies or closes after an exchange but before it writes the result, its host lacks a
  round that the other hosts have completed. The other hosts end in the next round.
- Only a leader can report to other hosts which rank of its host was lost. If the leader itself is lost,
  the other hosts report only that a rank of another host was lost.

A child process forked from a leader keeps gloo's connections open. If that leader dies, the other hosts
notice only at their deadlines.
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
"""Seconds past a round's deadline for which a host waits for the other hosts, if all its own ranks
have joined the round.

In this time another host may still report which of its ranks was late.
"""

_JOIN_S = 1.0
"""Seconds that `close` waits for the host-leader thread to exit. The thread checks for closing every
`SLICE_S`, which is much shorter."""

_NEWS_GO_S = 0.1
"""Seconds that `close` waits until the other host leaders have received the ending.

Leaders that are waiting in an exchange receive the ending at once. Without the wait, the exchange might
still be pending, and a gloo group with a pending exchange cannot be destroyed.
"""

_NOTHING = np.iinfo(np.int64).max
"""The largest lane value, which leaves the MIN of all other lanes unchanged."""

log = logging.getLogger("lockstep")


class HierarchicalCollective(SharedMemoryCollective):
    """The rounds of a group whose ranks are on several hosts; see `Collective`."""

    def __init__(
        self, group: Collective, host: HostGroup, host_leader: "_HostLeaderThread | None"
    ) -> None:
        """Called by `create` only. `host_leader` is None except on the first rank of a host."""
        said_by = len(host.ranks)
        result = host.cells.span(said_by, said_by + 1)
        super().__init__(group, host, Transport.HIERARCHICAL, result, NEWS_S)
        self._host_leader = host_leader

    @classmethod
    def create(
        cls, group: Collective, identities: Sequence[HostIdentity], *, lanes: int, timeout_s: float
    ) -> Self:
        """Set up shared memory on each host, and a gloo group of the hosts' first ranks.

        Every rank of `group` must call `create`. The transport owns `group`, uses it for start-up and
        gathers, and closes it. `timeout_s` bounds start-up and each exchange between hosts, so it must
        be at least the round timeout. The transport ends when the main thread of any host's first rank
        exits. If the ranks of some host cannot share memory, every rank raises the same `ConfigError`
        and `group` remains usable.
        """
        hosts = ranks_by_host(identities)
        host = HostGroup.meet(group, hosts, lanes=lanes, extra_writers=1, timeout_s=timeout_s)
        host_leader: _HostLeaderThread | None = None
        try:
            name = group.gather(secrets.token_hex(16).encode(), timeout_s)[0].decode()
            if not host.me:
                leaders = [ranks[0] for ranks in hosts]
                between = TorchCollective.among(leaders, group.rank, name, timeout_s=timeout_s)
                host_leader = _HostLeaderThread(host, between, group.rank)
            # Let all ranks wait here until the host leaders are connected.
            group.gather(b"", timeout_s)
        except BaseException:
            if host_leader is not None:
                host_leader.close()
            host.close()
            raise
        return cls(group, host, host_leader)

    def leave(self, host: HostGroup) -> None:
        """End the group for the other ranks. A host leader also reports the ending to other hosts."""
        if self._host_leader is None:
            super().leave(host)
        else:
            self._host_leader.close()


class _HostLeaderThread:
    """A thread of a host's first rank that exchanges the host's rounds with the other hosts.

    The thread exits when the group ends or when the rank's main thread exits.
    """

    def __init__(self, host: HostGroup, between: TorchCollective, rank: int) -> None:
        self._host = host
        self._between = between
        self._rank = rank
        self._closing = False
        # Not a daemon thread: the process aborts if a daemon thread is inside torch at interpreter
        # shutdown.
        self._thread = threading.Thread(target=self._run, name="lockstep-host-leader")
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, which reports the ending to the other hosts, and close the gloo group."""
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
            # Gloo does not propagate a failure. Each host leader that notices a failure therefore
            # closes its own connections, so that other host leaders notice it, too.
            self._between.close()
        except BaseException:
            log.exception(
                "the host leader thread of rank %d failed in round %d", self._rank, number
            )
            self._host.end(EndingCause.FAILED, self._rank, number - 1)
            self._between.close()

    def _carry(self, number: int) -> bool:
        """Exchange one round with the other hosts; return False if no further round will follow."""
        host, lanes = self._host, self._host.cells.lanes
        outgoing = np.full(lanes + 1, _NOTHING)
        folded = self._gather(number)
        if folded is None:
            ended = host.ended_before(number)
            if ended is not None:
                # Report the ending in a last exchange. Other host leaders may join it later, even after
                # this thread has exited.
                outgoing[lanes] = -ended.word
                self._between.launch(outgoing)
            return False
        outgoing[:lanes] = folded
        between = self._between.launch(outgoing)
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
        """Return the fold of this host's ranks in a round; None if the round can no longer complete."""
        host = self._host
        while not self._over(number):
            folded = host.look(host.here, number, SLICE_S)
            if folded is not None:
                return folded
        return None

    def _over(self, number: int) -> bool:
        """Return whether this round can no longer complete; end the group if this rank is closing.

        A rank whose main thread has exited launches no more rounds and counts as closing.
        """
        if self._closing or not threading.main_thread().is_alive():
            self._host.end(EndingCause.LEFT, self._rank, number - 1)
        return self._host.ended_before(number) is not None
