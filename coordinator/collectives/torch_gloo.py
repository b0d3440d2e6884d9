"""The reference transport: a gloo group of its own, and the fold of `all_reduce(MIN)`.

Gloo's all_reduce goes around the ring of ranks twice and its all_gather once, and what a round costs
is the latency of those steps: on two cores 4.4 against 2.4 ms at 4 ranks, 12.2 against 7.1 ms at 8
(119 lanes; int32 costs the same as int64). So a round of the usual size is gathered, and folded by
every rank for itself; only what would be much memory is reduced on the way.

The group is never shared: gloo matches operations by order alone, and two users that interleave
differently on two ranks silently receive each other's numbers. Tensors stay on the CPU.

A wait with a deadline on an asynchronous operation leaves gloo usable, a deadline inside gloo does
not; and a rank that notices a dead peer must close its own connections, since gloo does not pass the
news on. So each wait is bounded here, and `close` destroys the group at once.

Destroying a gloo group waits for its pending operation, up to gloo's own timeout. So a group that is
left while something is pending is kept, and destroyed when the next one is made: neither `close` nor
the end of the process is held by a rank that does not come.
"""

import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import CollectiveTimeout, ConfigError, GroupError, PeerLost
from ..collective import CommonStore, Vector
from ..lanes import fold
from ..transport import Transport
from .home_process import HomeProcess

_SIZE = struct.Struct("<q")

_SOURCE_PLACE = re.compile(r"^\[[^]]*\]\s*")

_ADVICE = re.compile(r"( by peer)\b.*")
"""The advice that gloo appends to a fact, which is only a guess."""

_SLICE_S = 0.1
"""No call into gloo lasts longer, since Python handles signals such as Ctrl-C only between calls."""

_SHORTEST_S = 0.001
"""The shortest wait that gloo knows: it takes zero for no timeout at all."""

GATHERED_BYTES_MAX = 1 << 16
"""The largest vector of a rank that is gathered; a larger one is reduced on the way.

Gathering takes half the steps and moves more bytes, so it is the size of one vector that decides, and
hardly the number of ranks.
"""

_READ_S = 2.0
"""How long to wait for a value of the store: notes of ranks that come to a gathering, and requests."""

_CLOSE_S = 1.0
"""How long `close` waits for an idle group's connections to be closed, which takes much less."""


class Attendance:
    """The notes of ranks that they come to a gathering, in the store in which torch lets them meet.

    Gloo does not say whom it waits for, and a start that hangs because one rank of many still opens its
    store says nothing if that one is not named. So each rank leaves a note before it joins a gathering,
    and whoever sees it fail reads the notes. The store may be in a process that is stopped: leaving a
    note does not wait for it to answer, and the thread that reads is waited for only briefly.
    """

    def __init__(self, store: distributed_c10d.Store, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are those of the group, and this is `rank`.

        No other group uses `store`, but one of the same ranks may have used it before.
        """
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._count = 0
        self.come()

    def come(self) -> None:
        """Leave a note that this rank comes to the next gathering, if there is still a store."""
        with suppress(RuntimeError):
            self._store.set(str(self._rank), str(self._count))
        self._count += 1

    def absent(self) -> list[int]:
        """Return the ranks that have not come to this rank's last gathering, ascending.

        Empty if the store does not answer or is gone, since nobody can tell then.
        """
        found: list[int] = []

        def read() -> None:
            try:
                found.extend(each for each in self._ranks if not self._has_come(each))
            except RuntimeError:
                found.clear()

        # A daemon, since it may never end.
        reader = threading.Thread(target=read, name="lockstep-attendance", daemon=True)
        reader.start()
        reader.join(_READ_S)
        return [] if reader.is_alive() else found

    def _has_come(self, rank: int) -> bool:
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._count - 1


def _as_group_error(
    error: RuntimeError, what: str, timeout_s: float, absent: Sequence[int] = ()
) -> GroupError:
    """Return the error of ours that says what went wrong, and which ranks were not there for it."""
    # Gloo begins with the place in its own source, which says nothing to a user of ours.
    text = _SOURCE_PLACE.sub("", str(error).partition("\n")[0]) or "no reason given"
    text = _ADVICE.sub(r"\1", text)
    named = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    if "timed out" in text.lower() or "timeout" in text.lower():
        if absent:
            return CollectiveTimeout(f"{named} did not come to {what} within {timeout_s} s")
        return CollectiveTimeout(f"{what} did not come back within {timeout_s} s: {text}")
    return PeerLost(f"a rank was lost in {what}: {text}" + f"; {named} had not come" * bool(absent))


def _wait(work: Any, timeout_s: float) -> None:
    """Wait for an operation; raises the RuntimeError of gloo when it fails or time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        completed = work.is_completed()
        left_s = deadline - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(_SHORTEST_S, min(left_s, _SLICE_S))))
            return
        except RuntimeError:
            # What has ended by now, perhaps just after the slice, is asked once more how it ended.
            if completed or (left_s <= _SLICE_S and not work.is_completed()):
                raise


class _Gloo(Protocol):
    """A group that torch knows by name, or one of ours."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions) -> Any: ...

    def allgather(self, output: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any: ...


class _Ownership:
    """The last reference to a group, held by a thread that drops it when it is told to.

    A thread, since what a daemon thread refers to outlives the interpreter, and is never destroyed
    by a process that ends. It does nothing but wait: a call into torch could end after the
    interpreter has, which aborts the process.
    """

    def __init__(self, group: _Gloo) -> None:
        self.operations: deque[Any] = deque(maxlen=2)
        """The operations that were started last; gloo runs them in order.

        Nothing else refers to them: they keep the connections open, and with them the other ranks
        waiting, whereas the errors that end an epoch are kept with all that their frames refer to.
        The one before the last is kept since gloo's thread may not have let go of it yet. Who lets
        go last frees a Python object, and a thread that does so while the interpreter ends aborts
        the process.
        """
        self._release = threading.Event()
        self._thread = threading.Thread(
            target=self._own, args=([group],), name="lockstep-gloo-owner", daemon=True
        )
        self._thread.start()

    def give_up(self) -> bool:
        """Let the group be destroyed, unless that would wait for its pending operation."""
        if self.operations and not self.operations[-1].is_completed():
            return False
        self.operations.clear()
        self._release.set()
        self._thread.join(_CLOSE_S)
        return True

    def _own(self, groups: list[_Gloo]) -> None:
        self._release.wait()
        groups.clear()


_abandoned: list[_Ownership] = []
"""Groups that were left while an operation was pending. The next group that is made destroys them."""


def _destroy_abandoned() -> None:
    _abandoned[:] = [each for each in _abandoned if not each.give_up()]


def _common_store() -> distributed_c10d.Store:
    # There is no public way to a store that all ranks have.
    return distributed_c10d._get_default_store()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def _minimum() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = cast("dist.ReduceOp", dist.ReduceOp.MIN)
    return options


class TorchCollective:
    """The rounds of one group over gloo; see `Collective`.

    It is its own pending round, since one is pending at most. In a process that was forked from the
    rank's, rounds and gatherings raise `UsageError`, and `close` does nothing.
    """

    def __init__(self, group: _Gloo, name: str, ranks: Sequence[int]) -> None:
        """Use `create`. The group is known by `name`, and its ranks by these numbers."""
        self.rank = group.rank()
        self.world_size = group.size()
        self.transport: str = Transport.TORCH.value
        self.launches = 0
        self._home = HomeProcess()
        self._group: _Gloo | None = group
        self._ownership = _Ownership(group)
        self._broken_by: GroupError | None = None
        self._rows: torch.Tensor
        """The vectors of the pending round, one in each row, or all of them folded in one."""
        notes = distributed_c10d.PrefixStore(f"lockstep/{name}/attendance", _common_store())
        self._attendance = Attendance(notes, ranks, ranks[self.rank])

    @classmethod
    def create(cls, *, timeout_s: float, ranks: list[int] | None = None) -> "TorchCollective":
        """Make a new gloo group of `ranks` (all, by default) for Lockstep's rounds alone.

        Collective over the default process group, which must have been initialised: every rank of
        it calls this, in the same order as its other group creations. `timeout_s` bounds what gloo
        itself may wait, so give at least the round timeout.

        Returns once every rank of the group has connected: gloo lets go of a rank that is through,
        and if that one leaves the group at once, those that are still connecting fail.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; call init_process_group first, "
                "or start the program with torchrun"
            )
        _destroy_abandoned()
        try:
            group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _as_group_error(error, "the making of the group", timeout_s) from error
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"this rank is not among the ranks {ranks} of the group")
        return cls._connected(
            cast("_Gloo", group), group.group_name, range(group.size()), timeout_s
        )

    @classmethod
    def among(
        cls, ranks: Sequence[int], rank: int, name: str, *, timeout_s: float
    ) -> "TorchCollective":
        """Connect `ranks`, of which this is `rank`, without the others; collective over `ranks` alone.

        They are numbered in the order in which they are given. `name` is theirs alone and was never
        used before: torch would give a group of the same ranks the name of one that was closed, and
        they would find the addresses that it has left in the store.
        """
        _destroy_abandoned()
        try:
            group = dist.ProcessGroupGloo(
                distributed_c10d.PrefixStore(f"lockstep/{name}", _common_store()),
                ranks.index(rank),
                len(ranks),
                timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise _as_group_error(error, "the making of the group", timeout_s) from error
        return cls._connected(cast("_Gloo", group), name, ranks, timeout_s)

    @classmethod
    def _connected(
        cls, group: _Gloo, name: str, ranks: Sequence[int], timeout_s: float
    ) -> "TorchCollective":
        collective = cls(group, name, ranks)
        try:
            collective.gather(b"", timeout_s)
        except BaseException:
            collective.close()
            raise
        return collective

    @property
    def _gloo(self) -> _Gloo:
        """The group, to be used and not kept: what an error's frames refer to is never destroyed."""
        if self._group is None:
            raise PeerLost("this rank has left the group")
        return self._group

    def common_store(self, name: str) -> CommonStore:
        """See `Collective`. It has a connection of its own, so that nobody else's wait holds it."""
        # torch's stubs lack it.
        own = cast("Any", _common_store()).clone()
        # Otherwise it waits half an hour for a value that is not there.
        own.set_timeout(timedelta(seconds=_READ_S))
        return cast("CommonStore", distributed_c10d.PrefixStore(f"lockstep/{name}", own))

    def launch(self, lanes: Vector) -> "TorchCollective":
        self.launches += 1
        mine = torch.from_numpy(lanes)
        if lanes.nbytes > GATHERED_BYTES_MAX:
            with self._starting():
                self._ownership.operations.append(self._gloo.allreduce([mine], _minimum()))
            self._rows = mine.view(1, -1)
            return self
        rows = self._rows = torch.empty((self.world_size, len(lanes)), dtype=torch.int64)
        with self._starting():
            self._ownership.operations.append(self._gloo.allgather([list(rows.unbind())], [mine]))
        return self

    def wait(self, timeout_s: float) -> Vector:
        self._finish(f"round {self.launches}", timeout_s)
        return fold(self._rows.numpy())

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """See `Collective`. Sends the length first, then the payloads padded to the longest."""
        self._home.require_here()
        self._attendance.come()
        size = torch.frombuffer(bytearray(_SIZE.pack(len(payload))), dtype=torch.int64)
        sizes = [int(each) for each in self._all_gather(size, timeout_s)]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = self._all_gather(padded, timeout_s)
        return [bytes(each[:size].numpy()) for each, size in zip(gathered, sizes, strict=True)]

    def _all_gather(self, mine: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._starting():
            self._ownership.operations.append(self._gloo.allgather([gathered], [mine]))
        self._finish("a gathering", timeout_s, self._attendance.absent)
        return gathered

    @contextmanager
    def _starting(self) -> Generator[None]:
        self._home.require_here()
        if self._broken_by is not None:
            raise self._broken_by.with_traceback(None)
        try:
            yield
        except RuntimeError as error:
            self._fail(error, "a collective", 0.0)

    def _finish(
        self, what: str, timeout_s: float, absent: Callable[[], Sequence[int]] = tuple
    ) -> None:
        """Wait for the operation that was started last; if it fails, so does every later call.

        `absent` is called then, and returns the ranks that did not come to it.
        """
        self._home.require_here()
        if self._group is None:
            raise PeerLost("this rank has left the group")
        try:
            _wait(self._ownership.operations[-1], timeout_s)
        except RuntimeError as error:
            self._fail(error, what, timeout_s, absent())

    def came_back(self, timeout_s: float) -> bool:
        """Wait for the operation that was started last, for a while; say whether it is over."""
        if self._group is None:
            return True
        work = self._ownership.operations[-1]
        try:
            _wait(work, timeout_s)
        except RuntimeError:
            return bool(work.is_completed())
        return True

    def _fail(
        self, error: RuntimeError, what: str, timeout_s: float, absent: Sequence[int] = ()
    ) -> NoReturn:
        self._broken_by = _as_group_error(error, what, timeout_s, absent)
        raise self._broken_by from error.with_traceback(None)

    def close(self) -> None:
        """See `Collective`. If an operation is pending, others notice at their own deadlines."""
        if not self._home.is_here:
            return
        group, self._group = self._group, None
        if group is None:
            return
        if dist.is_initialized() and isinstance(group, dist.ProcessGroup):
            # torch does not know the group if the engine has destroyed all and begun anew.
            with suppress(ValueError):
                dist.destroy_process_group(group)
        del group
        if not self._ownership.give_up():
            _abandoned.append(self._ownership)
