"""The journal: everything that changes the replica, in order, as one rolling digest.

Equal journals give equal replicas, since the replica is deterministic; and a page that was taken or
given back is an entry, so that drifting free lists show in the round in which they begin to drift.
The last entries are kept for the error path, which names the first one that differs.
"""

from collections.abc import Sequence
from typing import cast

import msgpack
import xxhash

from ....coordinator.divergence import Recorder
from ....errors import UsageError


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
        """Append one change: a word, then the numbers and names that determine it.

        Raises `UsageError`, and appends nothing, for a name or fact of the engine's that has no bytes
        which are the same in every process: an object has its own `repr` in each, and a set its own
        order. A mapping counts in the order of its keys.
        """
        try:
            # At once, since what an entry names may change later. The bytes say where each part ends.
            packed: bytes = self._pack(entry)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"{entry[0]}: {_culprit(entry)} has no bytes that are the same on every rank; give"
                " text, bytes, integers of 64 bits, numbers, booleans, None, lists or tuples of these"
            ) from error
        self._update(packed)
        self._entries.append(packed)
        self.count += 1

    def parts(self, entry: object) -> Sequence[object]:
        """See `Recorder`; the parts are as they were when the entry was recorded."""
        return cast("list[object]", msgpack.unpackb(cast("bytes", entry), strict_map_key=False))


def _culprit(entry: tuple[object, ...]) -> str:
    """Return, as text of bounded length, the first part of an entry that cannot be packed."""
    for part in entry:
        try:
            msgpack.packb(part)
        except (TypeError, ValueError, OverflowError):
            text = ascii(part)
            shown = text if len(text) <= 80 else f"{text[:77]}..."
            return f"{type(part).__name__} {shown}"
    return "it"
