"""The interface of a transport: one collective for a round, folded with MIN, and a bounded wait.

Every transport gives every rank the identical vector, bit for bit; one contract suite holds them
all to it. A transport never retries and never concludes anything alone: what it cannot deliver in
time it reports as an error, and the epoch is over.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]
"""A round's lanes: one-dimensional, contiguous, of the epoch's fixed length."""


class CommonStore(Protocol):
    """Values by their keys that all ranks have, as in a `torch.distributed.Store`. For any thread.

    Each method may wait for another process; raises `RuntimeError` or `OSError` where that does not
    answer.
    """

    def set(self, key: str, value: bytes) -> None:
        """Give a key a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return the value of a key; raises `RuntimeError` or `KeyError` if none is there in time."""
        ...

    def delete_key(self, key: str) -> bool:
        """Forget a key; say whether it was there."""
        ...


class PendingRound(Protocol):
    """A round that was launched and whose result may not be there yet."""

    def wait(self, timeout_s: float) -> Vector:
        """Return the element-wise minimum over all ranks.

        Raises `CollectiveTimeout` after `timeout_s` and `PeerLost` when a rank is known to be gone.
        After either, the collective is broken for good. May be called once.
        """
        ...


class Collective(Protocol):
    """The dedicated channel between the ranks of one group, used for rounds and for nothing else."""

    transport: str
    """The name of the transport; after a colon the reason for it, where the group has chosen it."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        ...

    @property
    def launches(self) -> int:
        """How many collectives this rank has launched for rounds since the start."""
        ...

    def launch(self, lanes: Vector) -> PendingRound:
        """Start the one collective of a round. The transport copies `lanes` or owns it from now on.

        Rounds are launched in the same order on every rank, and at most one is pending.
        """
        ...

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all ranks by rank, on every rank.

        Only for bootstrap, teardown, and the error path that explains a divergence: never in a step.
        """
        ...

    def common_store(self, name: str) -> CommonStore:
        """Return a store that all ranks have, with keys that only callers with this name see.

        It is where the ranks have met, so it goes with the process that serves it. At the start only:
        it may connect.
        """
        ...

    def close(self) -> None:
        """Release what the transport holds; does not wait for others. May be called twice.

        After an error this lets the other ranks notice at once. In a process that was forked from this
        rank's it does nothing, and every other call that needs the group raises `UsageError`.
        """
        ...
