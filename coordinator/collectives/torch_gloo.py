"""The reference transport: a dedicated gloo group, and the fold of `all_reduce(MIN)`.

Gloo's all_reduce passes the ring of ranks twice and its all_gather once, and the latency of those steps
dominates a round. On two cores, a round by all_reduce takes 4.4 ms at 4 ranks and 12.2 ms at 8; a round
by all_gather takes 2.4 and 7.1 ms (119 lanes; int32 costs the same as int64). Therefore rounds of the
usual size are gathered and folded by every rank. Only vectors above `GATHERED_BYTES_MAX` are reduced by
gloo.

The group is never shared, because gloo matches the collectives of ranks only by the sequence in which
each rank starts them. Two users that start collectives in different sequences on two ranks would
silently receive each other's numbers. Tensors stay on the CPU.

Gloo stays usable after a timed wait for an asynchronous collective, but not after a timeout inside
gloo. Gloo does not propagate failures, so a rank that notices a dead peer must close its own
connections. Therefore this module bounds each wait itself, and `close` destroys the group at once.

Destroying a gloo group blocks until its pending collective finishes, up to gloo's own timeout. A group
with a pending collective is therefore kept until the next group is created, so that neither `close` nor
process exit waits for an absent rank.
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
"""Matches the advice that gloo appends to an error. The advice is removed, because it is only a guess.
"""

_SLICE_S = 0.1
"""The maximum duration of one call into gloo in seconds. Python handles signals such as Ctrl-C only
between calls, so a longer call would delay them."""

_SHORTEST_S = 0.001
"""The shortest timeout in seconds that gloo accepts; gloo treats zero as no timeout."""

GATHERED_BYTES_MAX = 1 << 16
"""The largest vector in bytes that every rank gathers and folds itself; gloo reduces larger vectors.

A gather takes half the steps of an all_reduce but moves more bytes. Which one is faster therefore
depends more on the vector's size than on the number of ranks.
"""

_READ_S = 2.0
"""Seconds to wait for a value of the rendezvous store, such as the presence keys of a gather."""

_CLOSE_S = 1.0
"""Seconds that `close` waits at most for an idle group's connections to close. Usually they close much
sooner."""


class PresenceKeys:
    """Presence keys in the rendezvous store, which record the ranks that joined each gather.

    Gloo's timeout does not name the missing rank. Each rank therefore sets a key before it joins a
    gather, and a rank whose gather fails reads the keys. The store's process may be stopped, so setting
    a key does not wait for a reply, and reading keys waits at most `_READ_S`.
    """

    def __init__(self, store: distributed_c10d.Store, ranks: Sequence[int], rank: int) -> None:
        """Track which of `ranks` join gathers; this process is `rank`.

        No other group uses `store` at the same time, but an earlier group of the same ranks may have
        used it.
        """
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._count = 0
        self.come()

    def come(self) -> None:
        """Record that this rank joins the next gather; ignore a failure of the store."""
        with suppress(RuntimeError):
            self._store.set(str(self._rank), str(self._count))
        self._count += 1

    def absent(self) -> list[int]:
        """Return the ranks that have not joined this rank's last gather, ascending.

        Returns an empty list if the store fails or does not answer.
        """
        found: list[int] = []

        def read() -> None:
            try:
                found.extend(each for each in self._ranks if not self._has_come(each))
            except RuntimeError:
                found.clear()

        # The reader is a daemon thread, because it may block forever.
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
    """Convert gloo's error to a Lockstep error that names the absent ranks."""
    # Remove the location in gloo's source from the beginning of the message; users do not need it.
    text = _SOURCE_PLACE.sub("", str(error).partition("\n")[0]) or "no reason given"
    text = _ADVICE.sub(r"\1", text)
    named = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    if "timed out" in text.lower() or "timeout" in text.lower():
        if absent:
            return CollectiveTimeout(f"{named} did not join {what} within {timeout_s} s")
        return CollectiveTimeout(f"{what} did not complete within {timeout_s} s: {text}")
    return PeerLost(
        f"a rank was lost in {what}: {text}" + f"; {named} had not joined" * bool(absent)
    )


def _wait(work: Any, timeout_s: float) -> None:
    """Wait for a collective; raise gloo's `RuntimeError` if the collective fails or times out."""
    deadline = time.monotonic() + timeout_s
    while True:
        completed = work.is_completed()
        left_s = deadline - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(_SHORTEST_S, min(left_s, _SLICE_S))))
            return
        except RuntimeError:
            # If the collective completed just after this wait timed out, wait again to get its result.
            if completed or (left_s <= _SLICE_S and not work.is_completed()):
                raise


class _Gloo(Protocol):
    """The methods of a gloo group that rounds use."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions) -> Any: ...

    def allgather(self, output: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any: ...


class _Ownership:
    """Holds the last reference to a gloo group in a thread, which drops the reference on request.

    The thread is a daemon: at process exit it still holds its reference, so the exit never destroys the
    group. The thread only waits and makes no call into torch, because such a call could return after
    interpreter shutdown and abort the process.
    """

    def __init__(self, group: _Gloo) -> None:
        self.operations: deque[Any] = deque(maxlen=2)
        """The last two collectives started; gloo runs them in order.

        Keep no other reference: an error's stack frames would keep a collective alive, and with it its
        connections. The second to last is kept because gloo's thread may still hold it. If gloo's
        thread dropped the last reference during interpreter shutdown, the process would abort.
        """
        self._release = threading.Event()
        self._thread = threading.Thread(
            target=self._own, args=([group],), name="lockstep-gloo-owner", daemon=True
        )
        self._thread.start()

    def give_up(self) -> bool:
        """Destroy the group and return True; return False if a collective is still pending."""
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
"""Groups that were closed while a collective was pending. They are destroyed when the next group is
created."""


def _destroy_abandoned() -> None:
    _abandoned[:] = [each for each in _abandoned if not each.give_up()]


def _common_store() -> distributed_c10d.Store:
    # Use a private function, because torch has no public API for the store that all ranks share.
    return distributed_c10d._get_default_store()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def _minimum() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = cast("dist.ReduceOp", dist.ReduceOp.MIN)
    return options


class TorchCollective:
    """The rounds of one group over gloo; see `Collective`.

    The object is also the `PendingRound` that `launch` returns. In a process forked from the rank's
    process, rounds and gathers raise `UsageError`, and `close` does nothing.
    """

    def __init__(self, group: _Gloo, name: str, ranks: Sequence[int]) -> None:
        """Called by `create` only.

        `name` is the group's unique name. `ranks` has, for each rank of the group, the number that
        error messages show.
        """
        self.rank = group.rank()
        self.world_size = group.size()
        self.transport: str = Transport.TORCH.value
        self.launches = 0
        self._home = HomeProcess()
        self._group: _Gloo | None = group
        self._ownership = _Ownership(group)
        self._broken_by: GroupError | None = None
        self._rows: torch.Tensor
        """The vectors of the pending round, one per row; a single row if gloo reduces them."""
        notes = distributed_c10d.PrefixStore(f"lockstep/{name}/attendance", _common_store())
        self._attendance = PresenceKeys(notes, ranks, ranks[self.rank])

    @classmethod
    def create(cls, *, timeout_s: float, ranks: list[int] | None = None) -> "TorchCollective":
        """Create a gloo group of `ranks` (default: all) dedicated to Lockstep's rounds.

        The default process group must be initialised, and every rank of it must call `create`, in the
        same order relative to other group creations. `timeout_s` bounds gloo's own waits, so it must be
        at least the round timeout.

        Returns only when every rank has connected, because ranks that are still connecting would fail
        if a connected rank left.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group first"
            )
        _destroy_abandoned()
        try:
            group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _as_group_error(error, "the creation of the group", timeout_s) from error
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"this rank is not among the ranks {ranks} of the group")
        return cls._connected(
            cast("_Gloo", group), group.group_name, range(group.size()), timeout_s
        )

    @classmethod
    def among(
        cls, ranks: Sequence[int], rank: int, name: str, *, timeout_s: float
    ) -> "TorchCollective":
        """Create a gloo group of `ranks`, which alone must call this method; this process is `rank`.

        The new group numbers the ranks in the given order. `name` must never have been used before,
        because torch would reuse the name of a closed group of the same ranks, and the ranks would read
        the closed group's addresses in the store.
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
            raise _as_group_error(error, "the creation of the group", timeout_s) from error
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
        """The gloo group. Do not store it: a reference in an error frame prevents its destruction."""
        if self._group is None:
            raise PeerLost("this rank has left the group")
        return self._group

    def common_store(self, name: str) -> CommonStore:
        """Return a shared store on a separate connection; waits on other stores do not block it.

        See `Collective`.
        """
        # Cast to `Any`, because torch's type stubs do not declare `clone`.
        own = cast("Any", _common_store()).clone()
        # In torch, the default timeout for a missing value is half an hour. Shorten it.
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
        """Gather payloads; see `Collective`. Sends lengths first, then padded payloads."""
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
        self._finish("a gather", timeout_s, self._attendance.absent)
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
        """Wait for the last collective started. After a failure every later call raises the same error.

        On failure, `absent` is called; it must return the ranks that did not join the collective.
        """
        self._home.require_here()
        if self._group is None:
            raise PeerLost("this rank has left the group")
        try:
            _wait(self._ownership.operations[-1], timeout_s)
        except RuntimeError as error:
            self._fail(error, what, timeout_s, absent())

    def came_back(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the last collective started; return whether it is over."""
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
        """Close the group; see `Collective`. Ranks that wait for this rank notice at their deadline."""
        if not self._home.is_here:
            return
        group, self._group = self._group, None
        if group is None:
            return
        if dist.is_initialized() and isinstance(group, dist.ProcessGroup):
            # Ignore torch's `ValueError`, raised if the engine has destroyed all groups and initialised
            # torch.distributed again.
            with suppress(ValueError):
                dist.destroy_process_group(group)
        del group
        if not self._ownership.give_up():
            _abandoned.append(self._ownership)
