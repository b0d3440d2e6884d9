"""What a group tells those who route requests: its KV events, and how its requests go.

Rank 0 tells; nothing here is agreed on, and what is told changes nothing in the group.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from functools import partial

from ..replica.notices import Notice
from .control import Control, encode
from .groups.event_wire import snapshot_to_bytes, to_frames
from .groups.kv_events import NOTHING_YET, BlockStored, EventBatch, KVEventPublisher
from .telling import (
    Counted,
    EventsTold,
    EventsWanted,
    Milestone,
    Progress,
    RequestsTold,
    RequestsWanted,
    SnapshotTold,
)

SendBytes = Callable[[str, bytes], "Future[int]"]
"""Sends bytes to the inbox at an address; the future fails if they are not taken in time."""

READERS_MAX = 64
"""Readers that are told at a time; one more takes the place of the first."""
ENDS_KEPT = 4096
"""Requests that have left, and of which whoever asks after them can be told how."""
_PART_BYTES = 1 << 20
"""The bytes of a part of a snapshot."""


class Teller:
    """Tells the readers of one group. Owned by the engine's thread of its rank 0.

    A reader is told in the order of what happened. One that cannot be reached is told no more, until
    it asks again.
    """

    def __init__(self, group: str, life: int, page_tokens: int, send: SendBytes) -> None:
        """`life` is larger than that of any earlier start of the group (`Lease.life`)."""
        self._group = group
        self._page_tokens = page_tokens
        self._send = send
        self._events = KVEventPublisher(life=life)
        self._readers: dict[str, None] = {}
        self._ended: dict[str, Progress] = {}
        """How the last requests have left."""
        self._lost = deque[str]()
        """Readers that could not be reached, as the sender's thread has noted."""

    def begin_life(self, life: int) -> None:
        """Go on in another life, where the directory has taken the group for lost. For any thread."""
        self._events.life = life

    def happened(self, notices: Sequence[Notice]) -> None:
        """Tell what notices add up to; the listener that a cache is opened with."""
        batch = self._events.fold(notices, time.time())
        if batch is not None and self._readers:
            self._tell_all(self._told(batch))

    def progress(
        self, request: str, stage: Milestone, *, hit_tokens: int, computed_tokens: int
    ) -> None:
        """Tell that a request has come to a stage just now."""
        told = Progress(
            group=self._group,
            request=request,
            stage=stage.value,
            at_us=time.time_ns() // 1000,
            hit_tokens=hit_tokens,
            computed_tokens=computed_tokens,
        )
        if stage in (Milestone.DONE, Milestone.REFUSED):
            self._ended.pop(request, None)
            self._ended[request] = told
            if len(self._ended) > ENDS_KEPT:
                del self._ended[next(iter(self._ended))]
        self._tell_all(told)

    def counted(self, data: bytes, timeout_s: float) -> None:
        """Tell what the group has counted, and wait until all readers have it, or for so long."""
        wait(self._tell_all(Counted(group=self._group, data=data)), timeout_s)

    def wanted(self, message: EventsWanted) -> None:
        """Tell a reader what it has missed, and everything from now on."""
        self._drop_lost()
        self._readers.pop(message.reader, None)
        if len(self._readers) >= READERS_MAX:
            del self._readers[next(iter(self._readers))]
        self._readers[message.reader] = None
        events = self._events
        missed = events.since(message.first - 1) if message.life == events.life else None
        if missed is None or events.last_sequence == NOTHING_YET:
            # That there is nothing yet has to be told as well.
            self._tell_snapshot(message.reader)
        for batch in missed or ():
            self._tell(message.reader, self._told(batch))

    def asked(self, message: RequestsWanted, here: Collection[str]) -> None:
        """Tell a reader how requests are; `here` are all that are in the group now."""
        known = {each: self._ended.get(each) for each in message.requests if each not in here}
        told = RequestsTold(
            group=self._group,
            here=tuple(each for each in message.requests if each in here),
            ended=tuple(each for each in known.values() if each is not None),
            unknown=tuple(request for request, each in known.items() if each is None),
        )
        self._tell(message.reader, told)

    def _tell_snapshot(self, reader: str) -> None:
        snapshot = self._events.snapshot()
        data = snapshot_to_bytes(snapshot)
        starts = range(0, len(data), _PART_BYTES)
        for part, start in enumerate(starts):
            told = SnapshotTold(
                group=self._group,
                life=snapshot.life,
                batches=snapshot.sequence + 1,
                part=part,
                parts=len(starts),
                data=data[start : start + _PART_BYTES],
            )
            self._tell(reader, told)

    def _told(self, batch: EventBatch) -> EventsTold:
        # An index needs no tokens, and to write them down takes longer than all else.
        bare = tuple(
            BlockStored(each.tier, each.keys, each.after) if isinstance(each, BlockStored) else each
            for each in batch.events
        )
        stripped = EventBatch(
            life=batch.life, sequence=batch.sequence, time_s=batch.time_s, events=bare
        )
        _, _, payload = to_frames(stripped, page_tokens=self._page_tokens)
        return EventsTold(
            group=self._group, life=self._events.life, sequence=batch.sequence, payload=payload
        )

    def _tell_all(self, message: Control) -> "list[Future[int]]":
        self._drop_lost()
        data = encode(message) if self._readers else b""
        return [self._post(reader, data) for reader in self._readers]

    def _drop_lost(self) -> None:
        while self._lost:
            self._readers.pop(self._lost.popleft(), None)

    def _tell(self, reader: str, message: Control) -> None:
        self._post(reader, encode(message))

    def _post(self, reader: str, data: bytes) -> "Future[int]":
        outcome = self._send(reader, data)
        outcome.add_done_callback(partial(self._note, reader))
        return outcome

    def _note(self, reader: str, outcome: "Future[int]") -> None:
        if outcome.exception() is not None:
            self._lost.append(reader)
