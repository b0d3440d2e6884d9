"""The journal: everything that changes the replica, in order, as one rolling digest.

Equal journals give equal replicas, since the replica is deterministic; and a page that was taken or
given back is an entry, so that drifting free lists show in the round in which they begin to drift.
The last entries are kept for the error path, which names the first one that differs.
"""

import msgpack
import xxhash

from ...coordinator.divergence import Recorder


class Journal(Recorder):
    """The last entries of what has changed the replica, and the rolling digest of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._digest = xxhash.xxh3_64()
        self._update = self._digest.update
        self._pack = msgpack.Packer().pack

    @property
    def digest(self) -> int:
        """63 bits of all entries so far; equal on all ranks after equal histories."""
        return self._digest.intdigest() >> 1

    def record(self, *entry: object) -> None:
        """Append one change: a word, then the numbers and names that determine it."""
        self._entries.append(entry)
        self.count += 1
        try:
            # At once, since what an entry names may change later. The bytes say where each part ends.
            self._update(self._pack(entry))
        except (TypeError, ValueError, OverflowError):
            # An engine may bring a fact of a kind that only it knows, or a number without bounds.
            self._update(repr(entry).encode())
