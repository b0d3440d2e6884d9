"""What a reader has asked one rank for, and what has become of each key of it.

A request is put in by one call of the backend and filled by its connection, both on one thread.
Until it is done or abandoned, the buffers of its reads are the connection's to fill.
"""

import asyncio
from collections.abc import Generator, Sequence
from typing import Final, NamedTuple

from ...errors import StorageError
from ...page_format.object_header import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    ExpectedHeader,
    HeaderFinding,
    PartHashes,
    check_header,
    check_run,
    part_checksums,
    presence_bits,
)
from ...page_format.object_shape import ObjectShape, Plan, part_table, pieces_of
from ..base import ReadOutcome
from .streams import Sinks, scratch
from .wire import FRAME_BYTES, Ask, Fetch, Pages, State

_PIECE_BYTES: Final = 512 << 10
"""A large object is received and hashed in pieces of this size, which stay in a core's cache."""


class Request:
    """A request, from when it waits for its turn until every key of it is answered."""

    nbytes = 0
    """How much it may bring, which counts as in flight."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_abandoned = False
        self.unanswered = ReadOutcome.FAILED
        """What has become of keys that were not answered."""

    def message(self, number: int) -> Ask | Fetch:
        """Return what is sent for it."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Have what still comes of it go nowhere."""
        self._is_abandoned = True

    def finish(self) -> None:
        """Let those who wait go on: everything has been answered, or nothing more will be."""
        if not self.done.done():
            self.done.set_result(None)


class Question(Request):
    """Which objects of one pool and shard are there."""

    def __init__(self, pool: str, shard: str, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self._pool = pool
        self._shard = shard
        self.there = [False] * len(keys)

    def message(self, number: int) -> Ask:
        return Ask(number, self._pool, self._shard, self.keys)

    def answer(self, there: bytes) -> None:
        """Take the answer; raises `StorageError` if it is one to something else."""
        if len(there) != len(self.keys) or there.strip(b"\0\1"):
            raise StorageError(f"an answer of {len(there)} bytes about {len(self.keys)} objects")
        self.there = [bool(each) for each in there]


class Wanted(NamedTuple):
    """One object to read: its key, the digest of its name, and where its parts go."""

    key: str
    digest: bytes
    buffers: list[memoryview]


class Reading(Request):
    """Parts of objects of one pool, shard and shape, into the caller's buffers."""

    def __init__(self, pool: str, shard: str, shape: ObjectShape, wanted: Sequence[Wanted]) -> None:
        super().__init__([each.key for each in wanted])
        self._pool = pool
        self._shard = shard
        self._shape = shape
        self._wanted = list(wanted)
        self._expected = ExpectedHeader(shape)
        self.outcomes: list[ReadOutcome | None] = [None] * len(wanted)
        self._answered = 0
        self.nbytes = len(wanted) * (shape.nbytes + HEADER_BYTES)

    def message(self, number: int) -> Fetch:
        table, held = part_table(self._shape.parts), bytes(self._shape.held)
        return Fetch(number, self._pool, self._shard, table, held, self.keys)

    @property
    def is_answered(self) -> bool:
        """Whether all keys are."""
        return self._answered == len(self.keys)

    def abandon(self) -> None:
        """Let go of the buffers: what still comes goes nowhere."""
        super().abandon()
        self._wanted.clear()

    def receive(self, pages: Pages, attached_bytes: int) -> Generator[Sinks, None, None]:
        """Yield what the objects of `pages` are to be received into, and check what was received.

        Raises `StorageError` if these are not the next ones of this request, or as long as they are not
        to be.
        """
        first, count = pages.first, len(pages.states)
        whole, bare = pages.states.count(State.WHOLE), pages.states.count(State.BARE)
        nbytes = whole * self._shape.nbytes + (whole + bare) * HEADER_BYTES
        fits = first == self._answered and 0 < count <= len(self.keys) - first
        if not fits or attached_bytes != nbytes or max(pages.states) > State.WHOLE:
            raise StorageError(
                f"{count} objects from the position {first} with {attached_bytes} bytes, where {nbytes}"
                f" bytes from the position {self._answered} of {len(self.keys)} can be"
            )
        if self._is_abandoned:
            yield scratch(nbytes)
        elif nbytes <= FRAME_BYTES + HEADER_BYTES + self._shape.nbytes and count > 1:
            yield from self._receive_many(first, pages.states)
        else:
            for at, state in enumerate(pages.states, first):
                yield from self._receive_one(at, state)
        self._answered = first + count

    def _receive_many(self, first: int, states: bytes) -> Generator[Sinks, None, None]:
        """Receive objects that are small together by as few calls as possible."""
        headers = memoryview(bytearray(HEADER_BYTES * len(states)))
        sinks: list[memoryview] = []
        for at, state in enumerate(states):
            if state:
                sinks.append(headers[at * HEADER_BYTES : (at + 1) * HEADER_BYTES])
            if state == State.WHOLE:
                sinks += self._wanted[first + at].buffers
        yield sinks
        if self._is_abandoned:
            return
        for at, state in enumerate(states):
            header = headers[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
            plan = self._checked(first + at, state, header)
            if plan is not None:
                buffers = self._wanted[first + at].buffers
                self._judge(first + at, header, plan, part_checksums(plan.sizes, buffers))

    def _receive_one(self, at: int, state: int) -> Generator[Sinks, None, None]:
        """Receive one object, piece by piece, each of which is hashed when it is there."""
        header = memoryview(bytearray(HEADER_BYTES))
        if state:
            yield [header]
        plan = None if self._is_abandoned else self._checked(at, state, header)
        nbytes = self._shape.nbytes if state == State.WHOLE else 0
        if plan is None:
            yield scratch(nbytes)
            return
        hashes = PartHashes(plan.sizes)
        pieces = [min(_PIECE_BYTES, nbytes - done) for done in range(0, nbytes, _PIECE_BYTES)]
        for done, views in enumerate(list(pieces_of(self._wanted[at].buffers, pieces))):
            yield views
            if self._is_abandoned:
                yield scratch(sum(pieces[done + 1 :]))
                return
            for view in views:
                hashes.add(view)
        self._judge(at, header, plan, hashes.joined())

    def _checked(self, at: int, state: int, header: memoryview) -> Plan | None:
        """Note what the header of an object says; return where its wanted parts lie if that is well.

        The bytes of a `WHOLE` object whose header is not as it must be are not looked at.
        """
        if state == State.ABSENT:
            self.outcomes[at] = ReadOutcome.MISSING
            return None
        digest = self._wanted[at].digest
        finding = HeaderFinding.SOUND
        if not self._expected.fits(bytes(header), digest):
            finding = check_header(header, digest, self._shape)
        if finding is HeaderFinding.SOUND and state == State.WHOLE:
            return self._shape.plan(presence_bits(header))
        lacking = finding is HeaderFinding.LACKING
        self.outcomes[at] = ReadOutcome.LACKING if lacking else ReadOutcome.CORRUPT
        return None

    def _judge(self, at: int, header: memoryview, plan: Plan, checksums: bytes) -> None:
        """Note whether these are the checksums that the header states for the wanted parts."""
        start = 0
        self.outcomes[at] = ReadOutcome.OK
        for run in plan.runs:
            end = start + len(run.parts) * CHECKSUM_BYTES
            if check_run(header, run, checksums[start:end]) is not HeaderFinding.SOUND:
                self.outcomes[at] = ReadOutcome.CORRUPT
            start = end
