"""The reference transport: `torch.distributed.all_reduce(MIN)` on a gloo group of its own.

The group is never shared: gloo matches operations by order alone, and two users that interleave
differently on two ranks silently receive each other's numbers. Tensors stay on the CPU.

A wait with a deadline on an asynchronous operation leaves gloo usable, a deadline inside gloo does
not; and a rank that notices a dead peer must close its own connections, since gloo does not pass the
news on. So each wait is bounded here, and `close` destroys the group at once.
"""

import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CollectiveTimeout, ConfigError, GroupError, PeerLost
from .base import Vector

_SIZE = struct.Struct("<q")


def _as_group_error(error: RuntimeError, what: str, timeout_s: float) -> GroupError:
    text = str(error).splitlines()[0] if str(error) else "no reason given"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return CollectiveTimeout(f"{what} did not come back within {timeout_s} s: {text}")
    return PeerLost(f"a rank was lost in {what}: {text}")


class _TorchRound:
    def __init__(self, lanes: torch.Tensor, work: Any, number: int) -> None:
        self._lanes = lanes
        self._work = work
        self._number = number

    def wait(self, timeout_s: float) -> Vector:
        """See `PendingRound`."""
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _as_group_error(error, f"round {self._number}", timeout_s) from error
        vector: Vector = self._lanes.numpy()
        return vector


class TorchCollective:
    """The rounds of one group over gloo; see `Collective`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.launches = 0
        self._group: dist.ProcessGroup | None = group

    @classmethod
    def create(cls, *, timeout_s: float, ranks: list[int] | None = None) -> "TorchCollective":
        """Make a new gloo group of `ranks` (all, by default) for Lockstep's rounds alone.

        Collective over the default process group, which must have been initialised: every rank of
        it calls this, in the same order as its other group creations. `timeout_s` bounds what gloo
        itself may wait, so give at least the round timeout.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; call init_process_group first, "
                "or start the program with torchrun"
            )
        group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"this rank is not among the ranks {ranks} of the group")
        return cls(group)

    def launch(self, lanes: Vector) -> _TorchRound:
        """See `Collective`."""
        self.launches += 1
        tensor = torch.from_numpy(lanes)
        work = self._start(lambda group: dist.all_reduce(tensor, dist.ReduceOp.MIN, group, True))
        return _TorchRound(tensor, work, self.launches)

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """See `Collective`. Sends the length first, then the payloads padded to the longest."""
        size = torch.frombuffer(bytearray(_SIZE.pack(len(payload))), dtype=torch.int64)
        sizes = [int(each) for each in self._all_gather(size, timeout_s)]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = self._all_gather(padded, timeout_s)
        return [bytes(each[:size].numpy()) for each, size in zip(gathered, sizes, strict=True)]

    def _all_gather(self, mine: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = self._start(lambda group: dist.all_gather(gathered, mine, group, True))
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _as_group_error(error, "a gathering", timeout_s) from error
        return gathered

    def _start(self, operation: Any) -> Any:
        if self._group is None:
            raise PeerLost("this rank has left the group")
        try:
            return operation(self._group)
        except RuntimeError as error:
            raise _as_group_error(error, "a collective", 0.0) from error

    def close(self) -> None:
        """See `Collective`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
