"""Blocking writes and replacements of objects in a Mooncake Store, called from several threads.

The master admits one writer per key, so there is one first writer among all processes. The other
writers wait until it has finished, and check the object that it stored. See `reads` for generations.

No generation is stored twice, and each has all columns of the earlier ones. The danger is a slow
writer: it finds no object, but before the master admits it, another writer has stored the same
generation, replaced it by the next one, and removed it. So an admitted writer queries later generations
before it stores anything, and gives up if there are any. No later generation can appear before the
admitted writer has finished, because the next generation is built from the admitted writer's object.

This holds until the object disappears: by `remove`, eviction, loss of its owner, or corruption. A
writer that had read the object before may still store the next generation, which can hide columns that
others have stored again meanwhile. Reads of those columns are then LACKING.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...page_format.object_header import HEADER_BYTES, HeaderFinding, encode_object
from ...page_format.object_name import ObjectName
from ..base import ReadOutcome, WriteOutcome
from ..buffers import address_of
from ..error_log import ErrorLog
from ..threaded_backend import Stop
from .client import MooncakeClient
from .memory import RegisteredMemory, staging_views
from .names import GENERATIONS, WantedObject, key_of
from .pieces import BufferPiece, Code
from .reads import ObjectReader

_OTHER_WRITER_S: Final = 2.0
"""Seconds to wait for another writer of the same object; after that the other writer is assumed dead.
"""
_PAUSE_S: Final = 0.001

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class New:
    """An object to be written."""

    name: ObjectName
    want: WantedObject


class ObjectWriter:
    """Writes objects through one client. Thread-safe."""

    def __init__(
        self,
        client: MooncakeClient,
        memory: RegisteredMemory,
        reader: ObjectReader,
        complaints: ErrorLog,
    ) -> None:
        self._client = client
        self._memory = memory
        self._reader = reader
        self._complaints = complaints

    def write(self, news: Sequence[New], stop: Stop) -> list[WriteOutcome]:
        """Write the objects that do not exist yet; return one outcome per object.

        `news` has at most `KEYS_AT_A_TIME` objects.
        """
        standing = self._reader.latest([new.want.digest for new in news])
        fresh = [at for at, generation in enumerate(standing) if generation is None]
        codes = dict(zip(fresh, self._store([news[at] for at in fresh], 0, stop), strict=True))
        outcomes: list[WriteOutcome] = []
        for at, new in enumerate(news):
            code = codes.get(at, Code.EXISTS)
            known = code != Code.EXISTS
            outcomes.append(_outcome(code) if known else self._write_beside(new, stop))
        return outcomes

    def _write_beside(self, new: New, stop: Stop) -> WriteOutcome:
        """Write an object whose name exists or is being written by another writer.

        The outcome is PRESENT if the existing object has all columns of the new one.
        """
        until = time.monotonic() + _OTHER_WRITER_S
        while not stop.due():
            code = self._step(new, stop)
            if code == Code.EXISTS:
                return WriteOutcome.PRESENT
            if code is not None:
                return _outcome(code)
            if time.monotonic() >= until:
                return WriteOutcome.FAILED
            time.sleep(_PAUSE_S)
        return WriteOutcome.TIMED_OUT

    def _step(self, new: New, stop: Stop) -> int | None:
        """Try once to write an object; return a return code, or None if another attempt is needed.

        The return code is EXISTS if the stored object has all columns of the new one.
        """
        (generation,) = self._reader.latest([new.want.digest])
        if generation is None:
            (code,) = self._store([new], 0, stop)
            return None if code == Code.EXISTS else code
        look = self._reader.look(new.want, generation, stop)
        if look.code:
            gone = look.code in (Code.NOT_FOUND, Code.NOT_READY)
            return None if gone else look.code
        if look.finding is HeaderFinding.SOUND:
            return Code.EXISTS
        if look.finding is not HeaderFinding.LACKING:
            again = self._reader.look(new.want, generation, stop)
            if again.finding not in (HeaderFinding.SOUND, HeaderFinding.LACKING):
                self._client.remove([key_of(new.want.digest, generation)])
            return None
        return self._replace(new, generation, look.present, stop)

    def _replace(self, new: New, generation: int, present: int, stop: Stop) -> int | None:
        """Store the next generation, with the columns of the stored and the new object.

        Removes the earlier generations.
        """
        want = new.want
        if generation + 1 >= GENERATIONS:
            return Code.INVALID
        if present & ~want.shape.present:
            theirs = want.shape.of_columns(present)
            payload = memoryview(bytearray(theirs.nbytes))
            outcome = self._reader.read_at(
                WantedObject(want.digest, [payload] if payload.nbytes else [], theirs),
                generation,
                stop,
            )
            if outcome is not ReadOutcome.OK:
                return Code.NO_MASTER if outcome is ReadOutcome.FAILED else None
            united = want.shape.unite(want.buffers, payload, present)
            want = WantedObject(want.digest, [united], want.shape.with_columns(present))
        (code,) = self._store([New(new.name, want)], generation + 1, stop)
        if code == Code.EXISTS:
            return None
        if not code:
            self._client.remove([key_of(want.digest, each) for each in range(generation + 1)])
        return code

    def _store(self, news: Sequence[New], generation: int, stop: Stop) -> list[int]:
        """Store the objects for which this writer is the first; return one return code per object.

        EXISTS means that another writer is storing or has stored this generation, or that a later one
        exists.
        """
        if not news:
            return []
        keys = [key_of(new.want.digest, generation) for new in news]
        sizes = [HEADER_BYTES + new.want.shape.nbytes for new in news]
        codes = self._client.begin(keys, sizes)
        may = [at for at, code in enumerate(codes) if not code]
        begun = {keys[at] for at in may}
        try:
            later = self._reader.later([news[at].want for at in may], generation)
            for at, code in zip(may, later, strict=True):
                codes[at] = int(Code.EXISTS) if code > 0 else code
            ours = [at for at in may if not codes[at]]
            sent = self._send([news[at] for at in ours], [keys[at] for at in ours], stop)
            whole = [at for at, count in zip(ours, sent, strict=True) if count == sizes[at]]
            for at, count in zip(ours, sent, strict=True):
                codes[at] = min(count, -1) if count != sizes[at] else 0
            begun.difference_update(keys[at] for at in whole)
            for at, code in zip(
                whole, self._client.finish([keys[at] for at in whole]), strict=True
            ):
                codes[at] = code
        finally:
            self._client.give_up(list(begun))
        if Code.NO_ROOM in codes:
            self._complaints.say(
                "room",
                "no process has free memory for the store: start a process that owns a"
                " segment, or give segment_bytes=N",
            )
        return codes

    def _send(self, news: Sequence[New], keys: Sequence[str], stop: Stop) -> list[int]:
        """Transfer the started objects; return per object the bytes sent, or a negative error code."""
        staging = self._memory.staging()
        straight: list[int] = []
        pieces: list[list[BufferPiece]] = []
        sent = [int(Code.MASTER_LATE)] * len(news)
        for at, new in enumerate(news):
            want = new.want
            if stop.due():
                break
            staging.block(at)[:] = encode_object(new.name, want.digest, want.buffers, want.shape)
            header = BufferPiece(staging.block_address(at), HEADER_BYTES, 0)
            if not self._memory.covers(want.buffers):
                sent[at] = self._send_staged(keys[at], want, header, stop)
                continue
            straight.append(at)
            offset = HEADER_BYTES
            payload: list[BufferPiece] = []
            for view in want.buffers:
                payload.append(BufferPiece(address_of(view), len(view), offset))
                offset += len(view)
            pieces.append([header, *payload])
        codes = self._client.send([keys[at] for at in straight], pieces, stop)
        for at, code in zip(straight, codes, strict=True):
            sent[at] = code
        return sent

    def _send_staged(self, key: str, want: WantedObject, header: BufferPiece, stop: Stop) -> int:
        staging = self._memory.staging()
        (sent,) = self._client.send([key], [[header]], stop)
        for offset, views in staging_views(want.buffers, want.shape.plan(want.shape.present)):
            if sent < 0:
                break
            at = 0
            for view in views:
                staging.room[at : at + len(view)] = view
                at += len(view)
            piece = BufferPiece(staging.room_address, at, offset)
            (code,) = self._client.send([key], [[piece]], stop)
            sent = code if code < 0 else sent + code
        return sent


def _outcome(code: int) -> WriteOutcome:
    if not code:
        return WriteOutcome.OK
    return WriteOutcome.TIMED_OUT if code == Code.MASTER_LATE else WriteOutcome.FAILED
