"""The journal: every change of the replica, in order, as one rolling digest.

The replica is deterministic, so equal journals give equal replicas. Each page allocation and free is an
entry, so that the next round detects ranks whose free lists differ. The most recent entries are kept,
so that an error can name the first entry that differs between ranks.
"""

from collections.abc import Sequence
from typing import Final, cast

import msgspec
import xxhash

from ....coordinator.divergence import Recorder
from ....errors import UsageError

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


class Journal(Recorder):
    """The most recent changes of the replica, and a rolling digest of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._digest = xxhash.xxh3_64()
        self._update = self._digest.update
        self._pack = _ENCODER.encode

    @property
    def digest(self) -> int:
        """A 63-bit digest of all entries; equal on ranks with equal histories."""
        return self._digest.intdigest() >> 1

    def record(self, *entry: object) -> None:
        """Append one change of the replica: a word for its kind, then the values that determine it.

        If the encoding of an engine's value may differ between processes, as for an arbitrary object,
        raises `UsageError` and appends nothing. Sets and mappings are encoded in sorted order.
        """
        try:
            # Encode the values now, because the caller may change them later.
            packed = self._pack(entry)
        except (TypeError, ValueError, OverflowError, BufferError) as error:
            raise UsageError(
                f"{entry[0]}: {_culprit(entry)} has no bytes that are equal on every rank; pass"
                " text, bytes, integers of 64 bits, numbers, booleans, None, lists or tuples of these"
            ) from error
        self._update(packed)
        self._entries.append(packed)
        self.count += 1

    def parts(self, entry: object) -> Sequence[object]:
        """Return the parts (word and values) of a recorded entry, as they were when it was recorded."""
        return cast("list[object]", msgspec.msgpack.decode(cast("bytes", entry)))


def _culprit(entry: tuple[object, ...]) -> str:
    """Return a short text: type and value of the first part of `entry` that cannot be encoded."""
    for part in entry:
        try:
            _ENCODER.encode(part)
        except (TypeError, ValueError, OverflowError, BufferError):
            text = ascii(part)
            shown = text if len(text) <= 80 else f"{text[:77]}..."
            return f"{type(part).__name__} {shown}"
    return "it"
