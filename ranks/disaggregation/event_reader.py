"""Reading the KV events of groups into an index, and asking for what is missing."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .control import Control
from .groups.event_wire import from_frames, snapshot_from_bytes
from .groups.prefix_index import PrefixIndex
from .telling import EventsTold, EventsWanted, SnapshotTold

ASKS_AGAIN_S = 2.0
"""How long an answer may take before it is asked for again."""
ASKS_IN_SILENCE_S = 10.0
"""How long a group may say nothing before it is asked: it may have taken this reader for lost."""


@dataclass(slots=True)
class _Source:
    """A group whose events are read."""

    address: str
    life: int
    asked_s: float
    heard_s: float
    batches: int = 0
    """How many batches are in the snapshot of which parts have come."""
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """The parts of a snapshot that have come."""


class EventReader:
    """Keeps an index as exact as what comes allows. Owned by one thread."""

    def __init__(
        self, index: PrefixIndex, reader: str, send: Callable[[str, Control], object]
    ) -> None:
        """`reader` is the inbox that groups tell; `send` sends a message to the inbox of a group."""
        self._index = index
        self._reader = reader
        self._send = send
        self._sources: dict[str, _Source] = {}

    def follow(self, group: str, address: str, life: int, now_s: float) -> None:
        """Read what a group tells in this life of it; a later life takes the place of an earlier."""
        known = self._sources.get(group)
        if known is None or known.life < life:
            self._sources[group] = _Source(address, life, now_s, now_s)
            self._ask(group, now_s)

    def forget(self, group: str) -> None:
        """Read nothing more of a group, and drop what the index has of it."""
        if self._sources.pop(group, None) is not None:
            self._index.forget(group)

    def hear(self, message: EventsTold | SnapshotTold, now_s: float) -> None:
        """Take in what a group has told; what makes no sense counts as lost."""
        source = self._sources.get(message.group)
        if source is None or message.life != source.life:
            return
        source.heard_s = now_s
        exact = self._index.standing(message.group).exact
        if isinstance(message, SnapshotTold):
            if message.batches < source.batches:
                return
            if message.batches > source.batches:
                source.batches = message.batches
                source.parts.clear()
            source.parts[message.part] = message.data
            if len(source.parts) < message.parts:
                return
            snapshot = snapshot_from_bytes(
                b"".join(source.parts[at] for at in sorted(source.parts))
            )
            source.parts.clear()
            if snapshot is not None:
                exact = self._index.restore(message.group, snapshot)
        else:
            number = message.sequence.to_bytes(8, "big")
            batch = from_frames((b"", number, message.payload), life=message.life)
            if batch is not None:
                exact = self._index.apply(message.group, batch)
        if not exact:
            self.ask_again(now_s)

    def ask_again(self, now_s: float) -> None:
        """Ask those groups of which the index is not exact, unless they were asked just now.

        Those are asked, too, that have said nothing for long.
        """
        for group, source in self._sources.items():
            silent_s = now_s - max(source.asked_s, source.heard_s)
            late = now_s - source.asked_s > ASKS_AGAIN_S
            late &= not self._index.standing(group).exact
            if late or silent_s > ASKS_IN_SILENCE_S:
                self._ask(group, now_s)

    def _ask(self, group: str, now_s: float) -> None:
        source, standing = self._sources[group], self._index.standing(group)
        source.asked_s = now_s
        known = standing.through + 1 if standing.life == source.life else 0
        wanted = EventsWanted(reader=self._reader, life=source.life, first=known)
        self._send(source.address, wanted)
