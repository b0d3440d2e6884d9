"""The journal: everything that changes the replica, in order, as one rolling digest.

Equal journals give equal replicas, since the replica is deterministic; and a page that was taken or
given back is an entry, so that drifting free lists show in the round in which they begin to drift.
The last entries are kept for the error path, which names the first one that differs.
"""

import xxhash

from ...coordinator.divergence import Recorder


class Journal:
    """The rolling digest of what has changed the replica, and its last entries."""

    def __init__(self) -> None:
        self.digest = 0
        """63 bits; equal on all ranks after equal histories."""
        self.recorder = Recorder()

    def record(self, *entry: object) -> None:
        """Append one change: a word, then the numbers and names that determine it."""
        self.recorder.record(entry)
        self.digest = xxhash.xxh3_64_intdigest(repr(entry).encode(), self.digest) >> 1
