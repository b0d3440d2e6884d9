"""The transport for ranks of one host: each writes its lanes to shared memory and folds those of all.

It sends no message, and its only system call is the one that wakes a sleeper. Rounds that a rank has
launched come back without its help, so a pipelined one is there when it is asked for.

The memory is a file without a name (memfd), readable by this user alone, which the other ranks open
through the process that made it. It is gone when the last process that maps it is: however they end,
there is nothing to clean up. It has a cell for each writer and each of two rounds:

    header    magic, writers, lanes, ending; padded to a cache line
    cells     [round % 2][writer]: round number, checksum, padding; the lanes, padded

Two rounds are enough: nobody writes round k + 2 before it has read round k + 1 of all, and so nobody
does while another still reads round k. A cell is written from the back: lanes, checksum, number. Its
checksum is seeded with the number and checked over a copy, so that a reader never takes part of one
round for another, in whatever order a processor lets it see the writes.

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

_LINE = 8
"""Words in a cache line. No two ranks write to the same line."""

_MAGIC = 0x6C6F636B73746570
_MAGIC_AT, _WRITERS_AT, _LANES_AT, _ENDING_AT = range(4)
_CHECK_AT = 1
"""The word of a cell that has its checksum; the first word has the number of its round."""

_CLOSED = (LookupError, ValueError, OSError)
"""Raised by memory that a handler of signals has closed while it was used."""

Span = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]
"""The cells of some writers by the parity of the round: the word at which a cell begins, and the bytes
at which its lanes begin and end."""


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


class Cells:
    """One process's view of the memory. Knows nothing of ranks, deadlines or processes.

    Single words are read and written through a memoryview and lanes through the mmap, since arrays take
    several times as long. A look calls as few functions as it can: it often comes after milliseconds of
    other work, and then each function is cold.
    """

    def __init__(self, fd: int, writers: int, lanes: int, futex: Futex) -> None:
        """Map a file of `size` bytes, which is zeroed, or was stamped, until `close`."""
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
        # The lower half of a number, which is what a futex can compare, comes first.
        self._addresses = [[address + 8 * at for at in cells] for cells in self._at]
        self._wakes = [[futex.waker(each) for each in cells] for cells in self._addresses]

    @staticmethod
    def size(writers: int, lanes: int) -> int:
        """Return the number of bytes that the memory has."""
        return 8 * (_LINE + 2 * writers * _words_in_cell(lanes))

    def span(self, first: int, last: int) -> Span:
        """Return the cells of the writers `first` to `last` - 1."""
        even, odd = (
            tuple((at, 8 * (at + _LINE), 8 * (at + _LINE + self.lanes)) for at in cells[first:last])
            for cells in self._at
        )
        return even, odd

    def stamp(self) -> None:
        """Mark new memory as made for this many writers and lanes."""
        self._words[_WRITERS_AT], self._words[_LANES_AT] = self.writers, self.lanes
        self._words[_MAGIC_AT] = _MAGIC

    def require_stamped(self) -> None:
        """Raise `InternalError` unless the memory was made for this many writers and lanes."""
        found = self._words[: _LANES_AT + 1].tolist()
        if found != [_MAGIC, self.writers, self.lanes]:
            raise InternalError(
                f"shared memory for {self.writers} writers of {self.lanes} lanes begins with {found}"
            )

    @property
    def ending(self) -> int:
        """The word that says how the group has ended; 0 while it lasts."""
        return self._words[_ENDING_AT]

    @ending.setter
    def ending(self, word: int) -> None:
        self._words[_ENDING_AT] = word

    def write(self, writer: int, number: int, lanes: Vector) -> None:
        """Publish the lanes of a round, which are copied, and wake who waits for them."""
        words, parity = self._words, number & 1
        at = self._at[parity][writer]
        begin, body = 8 * (at + _LINE), lanes.data
        self._memory[begin : begin + body.nbytes] = body
        words[at + _CHECK_AT] = xxh3_64_intdigest(body, number) >> 1
        words[at] = number
        self._wakes[parity][writer]()

    def is_there(self, span: Span, number: int) -> bool:
        """Say whether all of some writers have written a round."""
        words = self._words
        for at, _, _ in span[number & 1]:  # noqa: SIM110 - a generator takes longer, cold.
            if words[at] != number:
                return False
        return True

    def read(self, span: Span, number: int) -> Vector | None:
        """Return the fold of the lanes of some writers in a round.

        Returns None unless all have written this round, and no checksum is wrong. One may be for a
        moment, while a processor sees writes in another order than they were made. No later round than
        `number` was written.
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
        """Return which of some writers have not written the round, counted from the first of them."""
        words = self._words
        return [at for at, cell in enumerate(span[number & 1]) if words[cell[0]] != number]

    def damaged(self, span: Span, number: int) -> list[int]:
        """Return which of some writers, which all have written the round, have a wrong checksum."""
        words, memory = self._words, self._memory
        return [
            writer
            for writer, (at, begin, end) in enumerate(span[number & 1])
            if words[at + _CHECK_AT] != xxh3_64_intdigest(memory[begin:end], number) >> 1
        ]

    def sleep(self, writer: int, number: int, timeout_s: float) -> None:
        """Sleep until a writer writes the round, or for `timeout_s`, or for less."""
        parity = number & 1
        seen = self._words[self._at[parity][writer]]
        if seen != number:
            self._futex.sleep(self._addresses[parity][writer], seen & 0xFFFFFFFF, timeout_s)

    def wake_all(self) -> None:
        """Wake everybody who sleeps, to look at the ending."""
        for wakes in self._wakes:
            for wake in wakes:
                wake()

    def close(self) -> None:
        """Unmap the memory; only `ending` may follow.

        An error that ended an epoch keeps alive all that its frames refer to, such as this object.
        """
        with suppress(ValueError):  # It was closed before.
            self._words = memoryview(bytearray(self._memory[: 8 * _LINE])).cast("q")
        # A caller that was interrupted with a reference to it gets a `ValueError`.
        self._mapped.release()
        self._addresses.clear()
        self._wakes.clear()
        self._memory.close()


def _words_in_cell(lanes: int) -> int:
    """Return the words of a cell: a line for number and checksum, and lines for the lanes."""
    return _LINE + -(-lanes // _LINE) * _LINE


class HostGroup:
    """One rank's side of the memory that the ranks of its host share: they wait, and end together.

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
        host: Self | None = None
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
                    host = cls(Cells(fd, writers, lanes, futex), fd, ranks, group.rank)
                    host.watch({rank: said[rank][0] for rank in ranks})
                    if not host.me:
                        host.cells.stamp()
            except (OSError, ValueError) as error:
                problem = f"the ranks of a host cannot share memory: {error}"
            agree_that_all_are_ready(group, problem, timeout_s)
            assert host is not None
            # The cells are marked by their maker, which is through now.
            host.cells.require_stamped()
        except BaseException:
            if host is not None:
                host.close()
            elif fd >= 0:
                os.close(fd)
            raise
        return host

    def watch(self, pids: dict[int, int]) -> None:
        """Learn from now on when the process of one of these ranks ends."""
        for rank, pid in pids.items():
            if pid != os.getpid():
                fd = os.pidfd_open(pid)
                self._rank_by_process[fd] = rank
                self._ended_processes.register(fd, select.POLLIN)

    def ended_before(self, number: int) -> Ending | None:
        """Return how the group has ended, if it has before this round came about."""
        word = self.cells.ending
        if not word:
            return None
        ending = Ending.of(word)
        return ending if ending.last_round < number else None

    def wait(self, span: Span, number: int, timeout_s: float, patience_s: float = 0.0) -> Vector:
        """Return the fold of some cells in a round.

        Waits `timeout_s` for the ranks of this host, and `patience_s` longer for a writer that speaks
        for others while all ranks of this host have come. Raises the error of the group's ending.
        """
        folded = self._look_often(span, number)
        if folded is not None and not self.cells.ending:
            return folded
        deadline = time.monotonic() + timeout_s
        while True:
            ending = self.ended_before(number)
            if ending is not None:
                raise ending.error
            # In this order: what a process has written is there once it is known to have ended, and
            # nobody is missing who has come.
            lost = {self._rank_by_process[fd] for fd, _ in self._ended_processes.poll(0)}
            late = self.cells.missing(self.here, number)
            folded = self.cells.read(span, number)
            if folded is not None:
                return folded
            # If all have come, the first rank of the host owes what the others have said.
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
        """Wait for some cells of a round, for a while; say whether the round is over.

        It is also over if the group has ended before it.
        """
        if self.cells.is_there(span, number):
            return True
        self._pause(span, number, min(timeout_s, SLICE_S))
        return self.cells.is_there(span, number) or self.ended_before(number) is not None

    def look(self, span: Span, number: int, timeout_s: float) -> Vector | None:
        """Return the fold of some cells in a round, or None if it is not there within a time.

        May give up earlier, and does not ask whether the group has ended.
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
        """Sleep until a writer that is missing writes, or for a time.

        If all have written, and what one has written is damaged for all of that time, end the group.
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
                # The first rank writes what no rank of the host does.
                writer = damaged[0] if span is self.here else 0
                self.end(EndingCause.DAMAGED, self.ranks[writer], number - 1)
                return
            time.sleep(_LOOK_S)

    def end(self, cause: EndingCause, rank: int, last_round: int) -> Ending:
        """Write down how the group ends, for all ranks of the host; return what holds for all.

        Whoever is first is right, unless another knows that it ended in an earlier round already.
        """
        ending = Ending(cause, rank, last_round)
        # The file's lock is between processes: two threads of one would both have it.
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
        # A rank that was stopped while it had the claim had the same to say, or will never say it.
        try:
            yield
        finally:
            # Who has closed it meanwhile has let go of the claim.
            if claimed and fd == self._fd:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the memory and of the processes. May be called twice."""
        self.cells.close()
        for fd in (*self._rank_by_process, self._fd):
            with suppress(OSError):
                os.close(fd)
        self._rank_by_process.clear()
        self._fd = -1


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
        # Sealed, so that no process that opens it can shrink it under the others.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_memory(pid: int, fd: int) -> int:
    if fd < 0:
        raise OSError("the first rank of the host could not make it")
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


class SharedMemoryCollective:
    """The rounds of a group whose ranks are all on one host; see `Collective`.

    It is its own pending round, since one is pending at most. A handler of a signal may close it
    whatever it interrupts. In a process that was forked from the rank's, rounds and gatherings raise
    `UsageError`, and `close` does nothing.
    """

    def __init__(
        self,
        group: Collective,
        host: HostGroup,
        transport: Transport = Transport.SHM,
        span: Span | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """Use `create`. A round folds the cells in `span`; `patience_s` is that of `HostGroup.wait`."""
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
        """Set up shared memory for rounds of `lanes` lanes; collective over `group`.

        `identities` has the host of each rank. The group is used to meet, and later for gatherings,
        and is closed with this transport. Raises the same `ConfigError` on every rank if they cannot
        share memory; the group is as it was then.
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
        # Counted first: what others may have read must not be written a second time.
        self.launches = number = self.launches + 1
        try:
            host.cells.write(host.me, number, lanes)
        except _CLOSED:
            self._raise_if_left()
            raise
        return self

    def wait(self, timeout_s: float) -> Vector:
        """See `PendingRound`. If it fails, so does every later call."""
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
        """Wait for a while; say whether `wait` would return, or raise for good, at once."""
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
                    # A handler has closed it meanwhile, and so has this rank left.
                    if self._host is not None:
                        raise
                self._host = None
                host.close()
        finally:
            self._group.close()

    def leave(self, host: HostGroup) -> None:
        """Let every round that this rank has not launched end, for the others."""
        host.end(EndingCause.LEFT, self.rank, self.launches)

    def _joined(self) -> HostGroup:
        host = self._host
        if host is None or self._broken_by is not None or not self._home.is_here:
            self._refuse()
        return host

    def _refuse(self) -> NoReturn:
        self._home.require_here()
        if self._broken_by is not None:
            # The one error is raised each time, and would keep all that it has passed through.
            raise self._broken_by.with_traceback(None)
        raise PeerLost("this rank has left the group")

    def _raise_if_left(self) -> None:
        if self._host is None:
            raise PeerLost("this rank has left the group") from None
