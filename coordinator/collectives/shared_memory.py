"""Transport for ranks of one host: each writes its lanes to shared memory and folds all lanes.

The transport sends no messages; its only system call besides waiting is the futex wake. A launched
round completes without further action of the rank, so a pipelined round is ready when its result is
needed.

The memory is an anonymous file (memfd) readable only by this user, which other ranks open through
/proc. The kernel frees it with the last process that maps it, so no clean-up is needed. Each writer has
two cells, one for even and one for odd rounds:

    header    magic, writers, lanes, ending; padded to a cache line
    cells     [round % 2][writer]: round number, checksum, padding; the lanes, padded

Two cells suffice: a rank writes round k + 2 only after it has read round k + 1 of all ranks, so no rank
still reads round k. A cell is written in the order lanes, checksum, number. The checksum is seeded with
the number and verified on a copy, so a reader never mixes two rounds, whatever the memory ordering.

A waiting rank polls, then sleeps until the missing rank writes. Between sleeps it checks for an ending
(terminal error) set by another rank, a dead process, and its deadline.

A dead process ends the group in the first round that it did not join, so no rank completes that round.
A deadline is less exact: if a rank joins just as another times out, some ranks may complete the round.
Those ranks raise the same error in the next round.
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
from typing import Final, NoReturn, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from ...errors import ConfigError, GroupError, InternalError, PeerLost
from ..bootstrap import agree_that_all_are_ready
from ..codec import Codec
from ..collective import Collective, CommonStore, Vector
from ..lanes import fold
from ..transport import Transport
from .ending import Ending, EndingCause
from .futex import Futex
from .home_process import HomeProcess

SLICE_S = 0.05
"""The longest sleep of a waiting rank, in seconds.

The death of a process causes no wake-up, nor does Ctrl-C, which Python handles between calls. A
sleeping rank notices such events after at most this time.
"""

_LOOKS = 100
"""A waiting rank polls this many times, in about 50 us in total, before it sleeps.

Between polls the rank yields its core, because the rank that it waits for may need that core.
"""

_SEEN_S = 0.001
"""The shortest sleep in seconds. A write becomes visible on another core in a much shorter time."""

_MEMORY: Final[Codec[tuple[int, int]]] = Codec(tuple[int, int])
"""Encodes a process id and that process's file descriptor of the shared memory (-1 if it has none)."""

_CLAIM_S = 1.0
"""Seconds to wait for the file lock while another rank of the host writes the ending."""

_LOOK_S = 0.0001
"""Seconds between two tries to lock the file, or two checks of a cell with an invalid checksum."""

_LINE = 8
"""The number of 64-bit words in a cache line. No two ranks write to the same cache line."""

_MAGIC = 0x6C6F636B73746570
_MAGIC_AT, _WRITERS_AT, _LANES_AT, _ENDING_AT = range(4)
_CHECK_AT = 1
"""The index of the checksum among a cell's words; index 0 holds the round number."""

_CLOSED = (LookupError, ValueError, OSError)
"""The errors that an access to the memory raises if a signal handler closes the memory meanwhile."""

Span = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]
"""The positions of the cells of consecutive writers: first those for even rounds, then those for odd
rounds. Each position is (index of the cell's first word, start byte of its lanes, end byte of its
lanes)."""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """The identity of a process's host. Processes with equal identities can share memory."""

    boot: str
    """The boot id of the running kernel."""
    processes: str
    """The PID namespace, because process ids of one container are meaningless in another."""

    @classmethod
    def here(cls) -> "HostIdentity":
        """Return the identity of this process's host; a unique identity if the system provides none."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
            return cls(boot, str(Path("/proc/self/ns/pid").readlink()))
        except OSError:
            return cls("unknown", str(os.getpid()))


def ranks_by_host(identities: Sequence[HostIdentity]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, ascending; hosts are in the order of their first rank."""
    ranks: dict[HostIdentity, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    return tuple(tuple(each) for each in ranks.values())


class Cells:
    """One process's mapping of the shared cells. `HostGroup` adds ranks and deadlines.

    Single words are accessed through a memoryview and lanes through the mmap, because numpy arrays are
    several times slower. A poll makes few calls, because the code of each call is often absent from the
    CPU cache.
    """

    def __init__(self, fd: int, writers: int, lanes: int, futex: Futex) -> None:
        """Map a memory file of `size(...)` bytes, which is zeroed or initialised."""
        self.writers, self.lanes = writers, lanes
        self._memory = mmap.mmap(fd, self.size(writers, lanes))
        self._words = self._mapped = memoryview(self._memory).cast("q")
        address = np.frombuffer(self._memory, dtype=np.int64).ctypes.data
        stride = _words_in_cell(lanes)
        self._at = [
            [_LINE + (parity * writers + writer) * stride for writer in range(writers)]
            for parity in (0, 1)
        ]
        self._futex = futex
        # Use the address of the lower half of each round number, because a futex compares 32 bits. The
        # lower half comes first in memory (little-endian).
        self._addresses = [[address + 8 * at for at in cells] for cells in self._at]
        self._wakes = [[futex.waker(each) for each in cells] for cells in self._addresses]

    @staticmethod
    def size(writers: int, lanes: int) -> int:
        """Return the size in bytes of the memory for these numbers of writers and lanes."""
        return 8 * (_LINE + 2 * writers * _words_in_cell(lanes))

    def span(self, first: int, last: int) -> Span:
        """Return the positions of the cells of the writers `first` to `last` - 1."""
        even, odd = (
            tuple((at, 8 * (at + _LINE), 8 * (at + _LINE + self.lanes)) for at in cells[first:last])
            for cells in self._at
        )
        return even, odd

    def stamp(self) -> None:
        """Write the magic number, the number of writers and the number of lanes into new memory."""
        self._words[_WRITERS_AT], self._words[_LANES_AT] = self.writers, self.lanes
        self._words[_MAGIC_AT] = _MAGIC

    def require_stamped(self) -> None:
        """Raise `InternalError` unless the memory was created for this number of writers and lanes."""
        found = self._words[: _LANES_AT + 1].tolist()
        if found != [_MAGIC, self.writers, self.lanes]:
            raise InternalError(
                f"shared memory for {self.writers} writers of {self.lanes} lanes begins with {found}"
            )

    @property
    def ending(self) -> int:
        """The word that encodes how the group ended; 0 while the group is running."""
        return self._words[_ENDING_AT]

    @ending.setter
    def ending(self, word: int) -> None:
        self._words[_ENDING_AT] = word

    def write(self, writer: int, number: int, lanes: Vector) -> None:
        """Copy the lanes of a round into the writer's cell, and wake the ranks that wait for them."""
        words, parity = self._words, number & 1
        at = self._at[parity][writer]
        begin, body = 8 * (at + _LINE), lanes.data
        self._memory[begin : begin + body.nbytes] = body
        words[at + _CHECK_AT] = xxh3_64_intdigest(body, number) >> 1
        words[at] = number
        self._wakes[parity][writer]()

    def is_there(self, span: Span, number: int) -> bool:
        """Return whether every writer with a cell in `span` has written round `number`."""
        words = self._words
        for at, _, _ in span[number & 1]:  # noqa: SIM110 - a generator takes longer, cold.
            if words[at] != number:
                return False
        return True

    def read(self, span: Span, number: int) -> Vector | None:
        """Return the fold of a round's lanes over the cells in `span`; None if a cell is incomplete.

        A cell is complete when its writer has written this round with a valid checksum. Memory ordering
        can make a checksum invalid for a moment. Call only while no writer has written a round later
        than `number`.
        """
        if not self.is_there(span, number):
            return None
        words, memory = self._words, self._memory
        rows: list[Vector] = []
        for at, begin, end in span[number & 1]:
            lanes = memory[begin:end]
            if words[at + _CHECK_AT] != xxh3_64_intdigest(lanes, number) >> 1:
                return None
            rows.append(np.frombuffer(lanes, np.int64))
        return fold(rows)

    def missing(self, span: Span, number: int) -> list[int]:
        """Return the writers of `span`, as indices within it, that have not written the round."""
        words = self._words
        return [at for at, cell in enumerate(span[number & 1]) if words[cell[0]] != number]

    def damaged(self, span: Span, number: int) -> list[int]:
        """Return the writers of `span`, as indices within it, whose cells fail their checksum.

        Call only when all writers of `span` have written the round.
        """
        words, memory = self._words, self._memory
        return [
            writer
            for writer, (at, begin, end) in enumerate(span[number & 1])
            if words[at + _CHECK_AT] != xxh3_64_intdigest(memory[begin:end], number) >> 1
        ]

    def sleep(self, writer: int, number: int, timeout_s: float) -> None:
        """Sleep until `writer` writes the round, or for `timeout_s`; may return earlier."""
        parity = number & 1
        seen = self._words[self._at[parity][writer]]
        if seen != number:
            self._futex.sleep(self._addresses[parity][writer], seen & 0xFFFFFFFF, timeout_s)

    def wake_all(self) -> None:
        """Wake all sleeping ranks so that they check whether the group has ended."""
        for wakes in self._wakes:
            for wake in wakes:
                wake()

    def close(self) -> None:
        """Unmap the memory; afterwards only `ending` may be read.

        The memory must be unmapped explicitly, because the error that ended an epoch keeps its stack
        frames, and thereby this object, alive.
        """
        with suppress(ValueError):  # Raised if the memory is already unmapped.
            self._words = memoryview(bytearray(self._memory[: 8 * _LINE])).cast("q")
        # Release the views even during a call that a signal handler has interrupted. That call then
        # raises `ValueError`.
        self._mapped.release()
        self._addresses.clear()
        self._wakes.clear()
        self._memory.close()


def _words_in_cell(lanes: int) -> int:
    """Return the number of 64-bit words in a cell.

    A cell has a cache line for round number and checksum, then the lanes.
    """
    return _LINE + -(-lanes // _LINE) * _LINE


class HostGroup:
    """One rank's access to the memory shared by its host's ranks: waits for rounds, ends the group.

    The writers of the cells are the host's ranks in order, then `extra_writers` more. Not usable after
    `close`. Not thread-safe, except that two threads may write and wait for different cells.
    """

    def __init__(self, cells: Cells, fd: int, ranks: tuple[int, ...], rank: int) -> None:
        """Called by `meet` only. This object owns `fd`, the memory's file descriptor, from now on."""
        self.cells = cells
        self.ranks = ranks
        """The ranks of this host, in the numbering of the whole group."""
        self.here = cells.span(0, len(ranks))
        self.me = ranks.index(rank)
        self._rank = rank
        self._fd = fd
        self._rank_by_process: dict[int, int] = {}
        """By pidfd, the rank of its process. A pidfd becomes readable when its process has ended."""
        self._ended_processes = select.poll()
        # The lock is reentrant, because a signal handler may close the transport while the thread that
        # it has interrupted holds the lock.
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
        """Set up memory shared with the other ranks of this host; `hosts` lists each host's ranks.

        Every rank of `group`, on all hosts, must call `meet`. If one of them cannot share memory, every
        rank raises the same `ConfigError`.
        """
        ranks = next(each for each in hosts if group.rank in each)
        writers = len(ranks) + extra_writers
        futex: Futex | None = None
        fd, problem = -1, None
        host: Self | None = None
        try:
            _require_calls()
            futex = Futex()
            if group.rank == ranks[0]:
                fd = _new_memory(Cells.size(writers, lanes))
        except (OSError, ConfigError) as error:
            problem = f"shared memory cannot be created: {error}"
        try:
            # The first rank of a host must keep its descriptor open until the others have opened it.
            gathered = group.gather(_MEMORY.encode((os.getpid(), fd)), timeout_s)
            pids_and_fds = [_MEMORY.decode(each) for each in gathered]
            try:
                if futex is not None and problem is None:
                    fd = fd if group.rank == ranks[0] else _open_memory(*pids_and_fds[ranks[0]])
                    host = cls(Cells(fd, writers, lanes, futex), fd, ranks, group.rank)
                    host.watch({rank: pids_and_fds[rank][0] for rank in ranks})
                    if not host.me:
                        host.cells.stamp()
            except (OSError, ValueError) as error:
                problem = f"the ranks of a host cannot share memory: {error}"
            agree_that_all_are_ready(group, problem, timeout_s)
            assert host is not None
            # Every rank is ready now, so the first rank of the host has initialised the cells.
            host.cells.require_stamped()
        except BaseException:
            if host is not None:
                host.close()
            elif fd >= 0:
                os.close(fd)
            raise
        return host

    def watch(self, pids: dict[int, int]) -> None:
        """Watch the processes of these ranks through pidfds, so that their exit is noticed."""
        for rank, pid in pids.items():
            if pid != os.getpid():
                fd = os.pidfd_open(pid)
                self._rank_by_process[fd] = rank
                self._ended_processes.register(fd, select.POLLIN)

    def ended_before(self, number: int) -> Ending | None:
        """Return the group's ending if the group ended before round `number`; otherwise None."""
        word = self.cells.ending
        if not word:
            return None
        ending = Ending.of(word)
        return ending if ending.last_round < number else None

    def wait(self, span: Span, number: int, timeout_s: float, patience_s: float = 0.0) -> Vector:
        """Return the fold of a round over the cells in `span`.

        Waits `timeout_s` for the ranks of this host. Once all of them have joined, waits `patience_s`
        longer for the cell in which the host's leader writes the fold of all hosts. If the group has
        ended, raises the error of its ending.
        """
        folded = self._look_often(span, number)
        if folded is not None and not self.cells.ending:
            return folded
        deadline = time.monotonic() + timeout_s
        while True:
            ending = self.ended_before(number)
            if ending is not None:
                raise ending.error
            # The order matters. Dead processes are checked first, so that data written before a death
            # is still seen. Missing ranks are checked before the read, so that a rank that has joined
            # is not reported as missing.
            lost = {self._rank_by_process[fd] for fd, _ in self._ended_processes.poll(0)}
            late = self.cells.missing(self.here, number)
            folded = self.cells.read(span, number)
            if folded is not None:
                return folded
            # If all ranks of the host have joined, the round waits only for the host's first rank,
            # which writes the fold of all hosts.
            for writer in late or (0,):
                if self.ranks[writer] in lost:
                    raise self.end(EndingCause.LOST, self.ranks[writer], number - 1).error
            left_s = deadline - time.monotonic() + (0.0 if late else patience_s)
            if left_s <= 0 and late:
                raise self.end(EndingCause.LATE, self.ranks[late[0]], number - 1).error
            if left_s <= 0 and self.cells.missing(span, number):
                raise self.end(EndingCause.LATE_ELSEWHERE, self._rank, number - 1).error
            self._pause(span, number, min(max(left_s, _SEEN_S), SLICE_S))

    def came_back(self, span: Span, number: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the cells of a round; return whether the round is over.

        A round is over when all cells of `span` are written, or when the group ended before the round.
        """
        if self.cells.is_there(span, number):
            return True
        self._pause(span, number, min(timeout_s, SLICE_S))
        return self.cells.is_there(span, number) or self.ended_before(number) is not None

    def look(self, span: Span, number: int, timeout_s: float) -> Vector | None:
        """Return the fold of a round over the cells in `span`; None if it does not arrive in time.

        May return None before `timeout_s`, and does not check whether the group has ended.
        """
        folded = self._look_often(span, number)
        if folded is None:
            self._pause(span, number, timeout_s)
            folded = self.cells.read(span, number)
        return folded

    def _look_often(self, span: Span, number: int) -> Vector | None:
        read = self.cells.read
        for _ in range(_LOOKS):
            folded = read(span, number)
            if folded is not None:
                return folded
            os.sched_yield()
        return None

    def _pause(self, span: Span, number: int, timeout_s: float) -> None:
        """Sleep until the first missing writer of `span` writes the round, at most `timeout_s`.

        If all writers have written but a checksum stays invalid for the whole time, end the group.
        """
        cells = self.cells
        first = 0 if span is self.here else len(self.ranks)
        missing = cells.missing(span, number)
        if missing:
            cells.sleep(first + missing[0], number, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while damaged := cells.damaged(span, number):
            if time.monotonic() >= deadline:
                # The cells after those of the host's ranks are written by the host's first rank, so
                # that rank caused their damage.
                writer = damaged[0] if span is self.here else 0
                self.end(EndingCause.DAMAGED, self.ranks[writer], number - 1)
                return
            time.sleep(_LOOK_S)

    def end(self, cause: EndingCause, rank: int, last_round: int) -> Ending:
        """Record how the group ends, for all ranks of the host; return the ending that now applies.

        An ending that is already recorded is replaced only by one with a smaller `last_round`.
        """
        ending = Ending(cause, rank, last_round)
        # Take a thread lock and a file lock, because the file lock excludes only other processes.
        with self._ending, self._claim():
            word = self.cells.ending
            if word and Ending.of(word).last_round <= last_round:
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
        # If another process still holds the lock after `_CLAIM_S`, that process was probably stopped.
        # Proceed without the lock, because that process would write the same ending or none.
        try:
            yield
        finally:
            # Do not unlock a descriptor that was closed meanwhile, because closing it released the
            # lock.
            if claimed and fd == self._fd:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the memory and the pidfds. May be called twice."""
        self.cells.close()
        for fd in (*self._rank_by_process, self._fd):
            with suppress(OSError):
                os.close(fd)
        self._rank_by_process.clear()
        self._fd = -1


def _require_calls() -> None:
    """Raise `ConfigError` if this Python lacks a system call that shared memory needs."""
    for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (fcntl, "F_ADD_SEALS")):
        if not hasattr(module, name):
            raise ConfigError(
                f"this Python has no {module.__name__}.{name}, because it was built for older systems;"
                " use a Python built for this system, or the transport torch"
            )


def _new_memory(size: int) -> int:
    fd = os.memfd_create("lockstep-round", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        # Seal the size, so that no process can shrink the file while other processes map it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_memory(pid: int, fd: int) -> int:
    if fd < 0:
        raise OSError("the first rank of the host could not create it")
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


class SharedMemoryCollective:
    """The rounds of a group whose ranks are all on one host; see `Collective`.

    The object is also the `PendingRound` that `launch` returns. A signal handler may close it at any
    point. In a process forked from the rank's process, rounds and gathers raise `UsageError`, and
    `close` does nothing.
    """

    def __init__(
        self,
        group: Collective,
        host: HostGroup,
        transport: Transport = Transport.SHM,
        span: Span | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """Called by `create` only. A round is the fold of the cells in `span`; see `HostGroup.wait`."""
        self.rank = group.rank
        self.world_size = group.world_size
        self.transport: str = transport.value
        self.launches = 0
        self._group = group
        self._home = HomeProcess()
        self._host: HostGroup | None = host
        self._span = span or host.here
        self._patience_s = patience_s
        self._broken_by: GroupError | None = None

    @classmethod
    def create(
        cls, group: Collective, identities: Sequence[HostIdentity], *, lanes: int, timeout_s: float
    ) -> Self:
        """Set up shared memory for rounds of `lanes` lanes between the ranks of `group`.

        Every rank of `group` must call `create`. `identities` has the host of each rank. The transport
        owns `group`, uses it for start-up and gathers, and closes it. If the ranks cannot share memory,
        every rank raises the same `ConfigError` and `group` remains usable.
        """
        hosts = ranks_by_host(identities)
        if len(hosts) > 1:
            named = " | ".join(", ".join(map(str, ranks)) for ranks in hosts)
            raise ConfigError(
                f"the transport shm needs all ranks on one host, and there are {len(hosts)}: {named};"
                " use hierarchical or auto"
            )
        return cls(group, HostGroup.meet(group, hosts, lanes=lanes, timeout_s=timeout_s))

    def launch(self, lanes: Vector) -> Self:
        host = self._joined()
        if lanes.shape != (host.cells.lanes,):
            raise InternalError(f"{lanes.shape} lanes in a round of {host.cells.lanes}")
        # Count the launch before the write. If the write fails, other ranks may already have read the
        # lanes, so this round must not be written again.
        self.launches = number = self.launches + 1
        try:
            host.cells.write(host.me, number, lanes)
        except _CLOSED:
            self._raise_if_left()
            raise
        return self

    def wait(self, timeout_s: float) -> Vector:
        """Return the fold of the round; see `PendingRound`. After a failure, later calls fail, too."""
        host = self._joined()
        try:
            return host.wait(self._span, self.launches, timeout_s, self._patience_s)
        except GroupError as error:
            self._broken_by = error
            raise
        except _CLOSED:
            self._raise_if_left()
            raise

    def came_back(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether `wait` would now return or raise without blocking."""
        host = self._host
        if host is None or not self._home.is_here:
            return True
        try:
            return host.came_back(self._span, self.launches, timeout_s)
        except _CLOSED:
            if self._host is None:
                return True
            raise

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        self._joined()
        try:
            return self._group.gather(payload, timeout_s)
        except GroupError as error:
            self._broken_by = error
            raise

    def common_store(self, name: str) -> CommonStore:
        return self._group.common_store(name)

    def close(self) -> None:
        if not self._home.is_here:
            return
        host = self._host
        try:
            if host is not None:
                try:
                    self.leave(host)
                except _CLOSED:
                    # If a signal handler has closed this transport meanwhile, this rank has already
                    # left the group, so ignore the error.
                    if self._host is not None:
                        raise
                self._host = None
                host.close()
        finally:
            self._group.close()

    def leave(self, host: HostGroup) -> None:
        """End the group for the other ranks: rounds that this rank has not launched fail."""
        host.end(EndingCause.LEFT, self.rank, self.launches)

    def _joined(self) -> HostGroup:
        host = self._host
        if host is None or self._broken_by is not None or not self._home.is_here:
            self._refuse()
        return host

    def _refuse(self) -> NoReturn:
        self._home.require_here()
        if self._broken_by is not None:
            # Drop the traceback: the same error object is raised each time and would accumulate frames.
            raise self._broken_by.with_traceback(None)
        raise PeerLost("this rank has left the group")

    def _raise_if_left(self) -> None:
        if self._host is None:
            raise PeerLost("this rank has left the group") from None
