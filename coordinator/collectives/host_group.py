"""The ranks of one host that share memory: how they meet, wait for each other, and end together.

The memory is a file without a name (memfd), readable by this user alone, which the others open
through the process that made it. It is gone when the last process that maps it is: however they end,
there is nothing to clean up.

A rank that waits looks a few times, since the others are mostly there, and then sleeps until the one
it misses has written. In between it looks for an ending that somebody else has found, for a process
that is gone, and at its deadline.

A process that is gone ends the group in the first round that it has not come to, so no rank has that
round. A deadline cannot be so exact: a rank that comes in the moment in which another gives up on it
may find the round complete, as may a third. They raise the same error in the next round, and the
epoch is over on every rank.
"""

import fcntl
import mmap
import os
import select
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, GroupError, InternalError
from ..bootstrap import agree_that_all_are_ready
from ..codec import Codec
from ..collective import Collective, Vector
from .cells import Cells, CellSpan
from .ending import Ending, EndingCause
from .futex import Futex

SLICE_S = 0.05
"""The longest sleep. Events that wake nobody, such as the death of a process, are noticed this late; so
is Ctrl-C, which Python handles between calls."""

_LOOKS = 100
"""How often a rank looks before it sleeps, in all some 50 us. In between it gives way: the one that it
waits for may need this core."""

_SEEN_S = 0.001
"""The shortest pause. Every processor sees long before what another one has written."""

_MEMORY: Final[Codec[tuple[int, int]]] = Codec(tuple[int, int])
"""The id of a process, and its descriptor of the memory; -1 if it has none."""

_CLAIM_S = 1.0
"""How long to wait for another rank of the host that is writing down the ending, too."""
_LOOK_S = 0.0001
"""How long to sleep between two looks at something that wakes nobody when it changes."""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """The host of a process: processes that have the same one can share memory."""

    boot: str
    """The random name of the running kernel."""
    processes: str
    """The namespace of process ids: those of two containers mean nothing to each other."""

    @classmethod
    def here(cls) -> "HostIdentity":
        """Return the host of this process; one that nobody shares where the system does not tell."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
            return cls(boot, str(Path("/proc/self/ns/pid").readlink()))
        except OSError:
            return cls("unknown", str(os.getpid()))


def ranks_by_host(identities: Sequence[HostIdentity]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, ascending; hosts in the order of their first rank."""
    ranks: dict[HostIdentity, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    return tuple(tuple(each) for each in ranks.values())


class HostGroup:
    """One rank's side of the memory that the ranks of its host share.

    The writers of its cells are those ranks in order, and then `extra_writers` more. Not to be used
    after `close`. Not thread-safe, except that two threads may write and wait for different cells.
    """

    def __init__(self, cells: Cells, fd: int, ranks: tuple[int, ...], rank: int) -> None:
        """Use `meet`. `fd` is the memory's, and belongs to this object from now on."""
        self.cells = cells
        self.ranks = ranks
        """The ranks of this host, numbered as in the whole group."""
        self.here = cells.span(0, len(ranks))
        """The cells of these ranks."""
        self.me = ranks.index(rank)
        self._rank = rank
        self._fd = fd
        self._rank_by_process: dict[int, int] = {}
        """The ranks of other processes, by a file descriptor that is readable once one has ended."""
        self._ended_processes = select.poll()
        # A handler of signals may close the cache, whatever of this it interrupts.
        self._ending = threading.RLock()

    @classmethod
    def meet(
        cls,
        group: Collective,
        hosts: Sequence[tuple[int, ...]],
        *,
        lanes: int,
        extra_writers: int = 0,
        timeout_s: float,
    ) -> Self:
        """Share memory with the other ranks of this host, of which `hosts` tells.

        Collective over `group`, which all hosts take part in. Raises the same `ConfigError` on every
        rank if one of them cannot.
        """
        ranks = next(each for each in hosts if group.rank in each)
        writers = len(ranks) + extra_writers
        futex: Futex | None = None
        fd, problem = -1, None
        host_group: Self | None = None
        try:
            _require_calls()
            futex = Futex()
            if group.rank == ranks[0]:
                fd = _new_memory(Cells.size(writers, lanes))
        except (OSError, ConfigError) as error:
            problem = f"shared memory cannot be made: {error}"
        try:
            # The first rank of a host must keep its own until the others have opened it.
            gathered = group.gather(_MEMORY.encode((os.getpid(), fd)), timeout_s)
            said = [_MEMORY.decode(each) for each in gathered]
            try:
                if futex is not None and problem is None:
                    fd = fd if group.rank == ranks[0] else _open_memory(*said[ranks[0]])
                    host_group = cls(_mapped(fd, writers, lanes, futex), fd, ranks, group.rank)
                    host_group.watch({rank: said[rank][0] for rank in ranks})
                    if not host_group.me:
                        host_group.cells.stamp()
            except (OSError, ValueError) as error:
                problem = f"the ranks of a host cannot share memory: {error}"
            agree_that_all_are_ready(group, problem, timeout_s)
            # The cells are marked by their maker, which is through now.
            if host_group is not None:
                host_group.cells.require_stamped()
        except BaseException:
            if host_group is not None:
                host_group.close()
            elif fd >= 0:
                os.close(fd)
            raise
        assert host_group is not None
        return host_group

    def watch(self, pids: dict[int, int]) -> None:
        """Learn from now on when the process of one of these ranks ends."""
        for rank, pid in pids.items():
            if pid != os.getpid():
                fd = os.pidfd_open(pid)
                self._rank_by_process[fd] = rank
                self._ended_processes.register(fd, select.POLLIN)

    def write(self, number: int, lanes: Vector) -> None:
        """Publish this rank's lanes of a round."""
        if lanes.shape != (self.cells.lanes,):
            raise InternalError(f"{lanes.shape} lanes in a round of {self.cells.lanes}")
        self.cells.write(self.me, number, lanes)

    def ended_before(self, number: int) -> Ending | None:
        """Return how the group has ended, if it has before this round came about."""
        word = self.cells.ending
        if not word:
            return None
        ending = Ending.of(word)
        return ending if ending.last_round < number else None

    def wait(
        self, number: int, span: CellSpan, timeout_s: float, patience_s: float = 0.0
    ) -> npt.NDArray[np.int64]:
        """Return what was written into some cells in a round.

        Waits `timeout_s` for the ranks of this host, and `patience_s` longer for a writer that speaks
        for others while all ranks of this host have come. Raises the error of the group's ending.
        """
        deadline = time.monotonic() + timeout_s
        rows = _look_often(number, span)
        if rows is not None and not self.cells.ending:
            return rows
        while True:
            ending = self.ended_before(number)
            if ending is not None:
                raise ending.error
            # In this order: what a process has written is there once it is known to have ended, and
            # nobody is missing who has come.
            lost = self._lost()
            late = self.here.missing(number)
            rows = span.read(number)
            if rows is not None:
                return rows
            # If all have come, the first rank of the host owes what the others have said.
            for writer in late or (0,):
                if self.ranks[writer] in lost:
                    raise self.end(Ending(EndingCause.LOST, self.ranks[writer], number - 1)).error
            left_s = deadline - time.monotonic() + (0.0 if late else patience_s)
            if left_s <= 0 and (late or span.missing(number)):
                raise self._late(number, late)
            self._pause(number, span, min(max(left_s, _SEEN_S), SLICE_S))

    def came_back(self, number: int, span: CellSpan, timeout_s: float) -> bool:
        """Wait for some cells of a round, for a while; say whether the round is over.

        It is also over if the group has ended before it.
        """
        if span.is_there(number):
            return True
        self._pause(number, span, min(timeout_s, SLICE_S))
        return span.is_there(number) or self.ended_before(number) is not None

    def look(self, number: int, span: CellSpan, timeout_s: float) -> npt.NDArray[np.int64] | None:
        """Return what is written into some cells in a round, or None if it is not within a time.

        May give up earlier, and does not ask whether the group has ended.
        """
        rows = _look_often(number, span)
        if rows is None:
            self._pause(number, span, timeout_s)
            rows = span.read(number)
        return rows

    def _pause(self, number: int, span: CellSpan, timeout_s: float) -> None:
        """Sleep until a writer that is missing writes, or for a time.

        If all have written, and what one has written is damaged for all of that time, end the group.
        """
        missing = span.missing(number)
        if missing:
            self.cells.sleep(missing[0], number, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while damaged := span.damaged(number):
            if time.monotonic() >= deadline:
                writer = damaged[0] if damaged[0] < len(self.ranks) else 0
                self.end(Ending(EndingCause.DAMAGED, self.ranks[writer], number - 1))
                return
            time.sleep(_LOOK_S)

    def end(self, ending: Ending) -> Ending:
        """Write down how the group ends, for all ranks of the host; return what holds for all.

        Whoever is first is right, unless another knows that it ended in an earlier round already.
        """
        # The file's lock is between processes: two threads of one would both have it.
        with self._ending, self._claim():
            word = self.cells.ending
            if word and Ending.of(word).last_round <= ending.last_round:
                return Ending.of(word)
            self.cells.ending = ending.word
        self.cells.wake_all()
        return ending

    @contextmanager
    def _claim(self) -> Generator[None]:
        deadline = time.monotonic() + _CLAIM_S
        fd, claimed = self._fd, False
        while not claimed and time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                claimed = True
            except BlockingIOError:
                time.sleep(_LOOK_S)
        # A rank that was stopped while it had the claim had the same to say, or will never say it.
        try:
            yield
        finally:
            # Who has closed it meanwhile has let go of the claim.
            if claimed and fd == self._fd:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def leave(self, last_round: int) -> None:
        """Let every round after `last_round` end with the news that this rank has left."""
        self.end(Ending(EndingCause.LEFT, self._rank, last_round))

    def close(self) -> None:
        """Let go of the memory and of the processes. May be called twice."""
        self.cells.close()
        for fd in (*self._rank_by_process, self._fd):
            with suppress(OSError):
                os.close(fd)
        self._rank_by_process.clear()
        self._fd = -1

    def _lost(self) -> set[int]:
        return {self._rank_by_process[fd] for fd, _ in self._ended_processes.poll(0)}

    def _late(self, number: int, late: Sequence[int]) -> GroupError:
        if late:
            return self.end(Ending(EndingCause.LATE, self.ranks[late[0]], number - 1)).error
        return self.end(Ending(EndingCause.LATE_ELSEWHERE, self._rank, number - 1)).error


def _look_often(number: int, span: CellSpan) -> npt.NDArray[np.int64] | None:
    for _ in range(_LOOKS):
        rows = span.read(number)
        if rows is not None:
            return rows
        os.sched_yield()
    return None


def _require_calls() -> None:
    """Raise `ConfigError` if this Python was built without a call that sharing memory needs."""
    for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (fcntl, "F_ADD_SEALS")):
        if not hasattr(module, name):
            raise ConfigError(
                f"this Python has no {module.__name__}.{name}, since it was built for older systems;"
                " use one that was built for this system, or the transport torch"
            )


def _new_memory(size: int) -> int:
    fd = os.memfd_create("lockstep-round", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        # Nobody who opens it can take memory away from under the others.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _mapped(fd: int, writers: int, lanes: int, futex: Futex) -> Cells:
    return Cells(mmap.mmap(fd, Cells.size(writers, lanes)), writers, lanes, futex)


def _open_memory(pid: int, fd: int) -> int:
    if fd < 0:
        raise OSError("the first rank of the host could not make it")
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
