"""The interface of a transport, which runs one MIN collective per round and waits a bounded time.

Every transport returns the bit-identical vector on every rank. One contract test suite checks all
transports. A transport never retries: if it cannot deliver in time, it raises an error and the epoch
ends.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]
"""An array of lanes: one rank's vote in a round, or the fold of all votes. One-dimensional and
contiguous; its length is fixed for the epoch."""


class CommonStore(Protocol):
    """A key-value store that all ranks share, like `torch.distributed.Store`. Thread-safe.

    Methods raise `RuntimeError` or `OSError` if the process that serves the store does not answer.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""
        ...

    def get(self, key: str) -> bytes:
        """Return a key's value; raise `RuntimeError` or `KeyError` if none appears before a timeout."""
        ...

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        ...


class PendingRound(Protocol):
    """A launched round whose result may not have arrived yet."""

    def wait(self, timeout_s: float) -> Vector:
        """Wait for the round to complete; return the element-wise minimum of all ranks' lanes.

        Raises `CollectiveTimeout` after `timeout_s`, and `PeerLost` if a rank is known to have left or
        to be lost. After either error the transport is permanently unusable. May be called once.
        """
        ...


class Collective(Protocol):
    """The channel between the ranks of one group. Each round is one collective on it."""

    transport: str
    """The transport's name, followed by a colon and the reason for its choice if a reason is known."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        ...

    @property
    def launches(self) -> int:
        """The number of rounds that this rank has launched since the start."""
        ...

    def launch(self, lanes: Vector) -> PendingRound:
        """Start the collective of one round. The transport copies `lanes` or takes ownership of it.

        Every rank launches rounds in the same order, and at most one round is pending.
        """
        ...

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Send `payload` to all ranks; return the payloads of all ranks, by ascending rank.

        Gathers are used in bootstrap, teardown, and the error path that explains a divergence; never in
        a step.
        """
        ...

    def common_store(self, name: str) -> CommonStore:
        """Return a key-value store shared by all ranks; `name` selects a private key space.

        The store is the ranks' rendezvous store, so its data is lost when the process that serves it
        exits. Call only at start-up, because the call may open a connection.
        """
        ...

    def close(self) -> None:
        """Release the transport's resources without waiting for other ranks. May be called twice.

        Closing after an error lets the other ranks notice at once. In a process forked from the rank's
        process, `close` does nothing, and every other call that needs the group raises `UsageError`.
        """
        ...
