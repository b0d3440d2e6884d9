"""The journal: everything that changes the replica, in order, as one rolling digest.

Equal journals give equal replicas, since the replica is deterministic; and a page that was taken or
given back is an entry, so that drifting free lists show in the round in which they begin to drift.
The last entries are kept for the error path, which names the first one that differs.
"""

from collections.abc import Sequence
from typing import Final, cast

import msgspec
import xxhash

from ....coordinator.divergence import Recorder
from ....errors import UsageError

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


class Journal(Recorder):
    """The last entries of what has changed the replica, and the rolling digest of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._digest = xxhash.xxh3_64()
        self._update = self._digest.update
        self._pack = _ENCODER.encode

    @property
    def digest(self) -> int:
        """63 bits of all entries so far; equal on all ranks after equal histories."""
        return self._digest.intdigest() >> 1

    def record(self, *entry: object) -> None:
        """Append one change: a word, then the numbers and names that determine it.

        Raises `UsageError`, and appends nothing, for a name or fact of the engine's that has no bytes
        which are the same in every process, as an object has none. Sets and mappings count as they are
        sorted.
        """
        try:
            # At once, since what an entry names may change later. The bytes say where each part ends.
            packed = self._pack(entry)
        except (TypeError, ValueError, OverflowError, BufferError) as error:
            raise UsageError(
                f"{entry[0]}: {_culprit(entry)} has no bytes that are the same on every rank; give"
                " text, bytes, integers of 64 bits, numbers, booleans, None, lists or tuples of these"
            ) from error
        self._update(packed)
        self._entries.append(packed)
        self.count += 1

    def parts(self, entry: object) -> Sequence[object]:
        """See `Recorder`; the parts are as they were when the entry was recorded."""
        return cast("list[object]", msgspec.msgpack.decode(cast("bytes", entry)))


def _culprit(entry: tuple[object, ...]) -> str:
    """Return, as text of bounded length, the first part of an entry that cannot be packed."""
    for part in entry:
        try:
            _ENCODER.encode(part)
        except (TypeError, ValueError, OverflowError, BufferError):
            text = ascii(part)
            shown = text if len(text) <= 80 else f"{text[:77]}..."
            return f"{type(part).__name__} {shown}"
    return "it"
