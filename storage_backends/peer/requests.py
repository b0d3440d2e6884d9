"""The requests to one rank, and the outcome of each key.

A backend call creates a request, and a connection completes it, both on one thread. Until the request
is done or abandoned, the connection owns the buffers.
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
from .wire import LookupRequest, ReadReply, ReadRequest, State

_GROUP_BYTES: Final = 256 << 10
"""Maximum total bytes of objects that are received together, so that they are still in the core's cache
when they are hashed."""
_PIECE_BYTES: Final = 256 << 10
"""Maximum bytes of one piece of a larger object, so that a piece is still in the core's cache when it
is hashed."""


class PeerRequest:
    """A request to one rank, with the outcome of every key."""

    nbytes = 0
    """Maximum bytes of the answer to the request. They count as in flight until the request is
    answered."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_abandoned = False
        self.unanswered = ReadOutcome.FAILED
        """The outcome for keys that the rank does not answer."""

    def message(self, number: int) -> LookupRequest | ReadRequest:
        """Return the wire message for this request; `number` identifies it on the connection."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Mark the request as abandoned. Bytes that still arrive for it are discarded."""
        self._is_abandoned = True

    def is_abandoned(self) -> bool:
        """Return whether the request was abandoned."""
        return self._is_abandoned

    def finish(self) -> None:
        """End the request and wake its waiters, because no more answers will arrive."""
        if not self.done.done():
            self.done.set_result(None)


class LookupQuestion(PeerRequest):
    """Asks a rank whether objects of one pool and shard exist."""

    def __init__(self, pool: str, shard: str, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self._pool = pool
        self._shard = shard
        self.there = [False] * len(keys)

    def message(self, number: int) -> LookupRequest:
        return LookupRequest(number, self._pool, self._shard, self.keys)

    def answer(self, there: bytes) -> None:
        """Record the answer; raises `StorageError` if the answer does not match this request."""
        if len(there) != len(self.keys) or there.strip(b"\0\1"):
            raise StorageError(f"an answer of {len(there)} bytes about {len(self.keys)} objects")
        self.there = [bool(each) for each in there]


class WantedParts(NamedTuple):
    """One object to read: its key, the digest of its name, and the buffers for its wanted parts."""

    key: str
    digest: bytes
    buffers: list[memoryview]


class PartsRead(PeerRequest):
    """A read of the wanted parts of objects of one pool, shard and shape into the caller's buffers."""

    def __init__(
        self, pool: str, shard: str, shape: ObjectShape, wanted: Sequence[WantedParts]
    ) -> None:
        super().__init__([each.key for each in wanted])
        self._pool = pool
        self._shard = shard
        self._shape = shape
        self._wanted = list(wanted)
        self._expected = ExpectedHeader(shape)
        self._expected_plan = shape.plan(shape.present)
        self.outcomes: list[ReadOutcome | None] = [None] * len(wanted)
        self._answered = 0
        self._received: list[tuple[int, ReadOutcome]] = []
        """(index in `keys`, outcome) of each received object whose authentication tag is not verified
        yet."""
        self.nbytes = len(wanted) * (shape.nbytes + HEADER_BYTES)

    def message(self, number: int) -> ReadRequest:
        table, held = part_table(self._shape.parts), bytes(self._shape.held)
        return ReadRequest(number, self._pool, self._shard, table, held, self.keys)

    @property
    def is_answered(self) -> bool:
        """Return whether the rank has answered all keys."""
        return self._answered == len(self.keys)

    def abandon(self) -> None:
        """Release the buffers; bytes that still arrive are discarded."""
        super().abandon()
        self._wanted.clear()

    def receive(self, pages: ReadReply, attached_bytes: int) -> Generator[Sinks, None, None]:
        """Yield the memory into which the objects of `pages` are received, and verify each object.

        The outcomes count only after `take`. The caller fills the yielded memory before it resumes this
        generator, unless the request is abandoned. Raises `StorageError` if the received objects are
        not the next ones of this request, or have a wrong length.
        """
        first, count = pages.first, len(pages.states)
        whole, bare = pages.states.count(State.WHOLE), pages.states.count(State.BARE)
        nbytes = whole * self._shape.nbytes + (whole + bare) * HEADER_BYTES
        fits = first == self._answered and 0 < count <= len(self.keys) - first
        if not fits or attached_bytes != nbytes or max(pages.states) > State.WHOLE:
            raise StorageError(
                f"{count} objects from position {first} with {attached_bytes} bytes; expected {nbytes}"
                f" bytes from position {self._answered} of {len(self.keys)}"
            )
        group: list[tuple[int, int]] = []
        each_bytes = HEADER_BYTES + self._shape.nbytes
        for at, state in enumerate(pages.states, first):
            if state == State.ABSENT:
                self._note(at, ReadOutcome.MISSING)
            elif each_bytes > _GROUP_BYTES:
                yield from self._receive_large(at, state)
            else:
                group.append((at, state))
                if len(group) * each_bytes + each_bytes > _GROUP_BYTES:
                    yield from self._receive_group(group)
                    group = []
        yield from self._receive_group(group)

    def take(self, pages: ReadReply) -> None:
        """Make the outcomes of the received `pages` final, because their tag was found valid."""
        for at, outcome in self._received:
            self.outcomes[at] = outcome
        self._received.clear()
        self._answered = pages.first + len(pages.states)

    def _receive_group(self, group: Sequence[tuple[int, int]]) -> Generator[Sinks, None, None]:
        """Receive small objects together, and verify them while they are in a core's cache."""
        if self.is_abandoned():
            yield scratch(sum(self._sent_bytes(state) for _, state in group))
            return
        headers = memoryview(bytearray(HEADER_BYTES * len(group)))
        sinks: list[memoryview] = []
        for number, (at, state) in enumerate(group):
            sinks.append(headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES])
            if state == State.WHOLE:
                sinks += self._wanted[at].buffers
        yield sinks
        if self.is_abandoned():
            return
        for number, (at, state) in enumerate(group):
            header = bytes(headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES])
            plan = self._checked(at, state, header)
            if plan is not None:
                self._judge(at, header, plan, part_checksums(plan.sizes, self._wanted[at].buffers))

    def _receive_large(self, at: int, state: int) -> Generator[Sinks, None, None]:
        """Receive one object in pieces, and hash each piece on arrival."""
        if self.is_abandoned():
            yield scratch(self._sent_bytes(state))
            return
        header = bytearray(HEADER_BYTES)
        nbytes = self._sent_bytes(state) - HEADER_BYTES
        pieces = [min(_PIECE_BYTES, nbytes - done) for done in range(0, nbytes, _PIECE_BYTES)]
        # Receive the header together with the first piece of the payload. If the header is invalid, the
        # buffers' bytes are undefined anyway.
        buffers = list(pieces_of(self._wanted[at].buffers, pieces)) or [[]]
        yield [memoryview(header), *buffers[0]]
        plan = None if self.is_abandoned() else self._checked(at, state, bytes(header))
        hashes = None if plan is None else PartHashes(plan.sizes)
        for done, views in enumerate(buffers):
            if done:
                yield views
            if self.is_abandoned():
                yield scratch(sum(pieces[done + 1 :]))
                return
            if hashes is not None:
                for view in views:
                    hashes.add(view)
        if plan is not None and hashes is not None:
            self._judge(at, bytes(header), plan, hashes.joined())

    def _sent_bytes(self, state: int) -> int:
        return HEADER_BYTES + (self._shape.nbytes if state == State.WHOLE else 0)

    def _note(self, at: int, outcome: ReadOutcome) -> None:
        self._received.append((at, outcome))

    def valid_plan(self, at: int, header: bytes) -> Plan | None:
        """Return the positions of the wanted parts in an object with this header.

        Returns None if the header is invalid or the object lacks a wanted part. `at` is the object's
        index.
        """
        finding, plan = self._found(at, header)
        return plan if finding is HeaderFinding.SOUND else None

    def _checked(self, at: int, state: int, header: bytes) -> Plan | None:
        """Return the positions of a received object's wanted parts if its header is valid.

        Otherwise record the object's outcome and return None.
        """
        finding, plan = self._found(at, header)
        if finding is HeaderFinding.SOUND and state == State.WHOLE:
            return plan
        lacking = finding is HeaderFinding.LACKING
        self._note(at, ReadOutcome.LACKING if lacking else ReadOutcome.CORRUPT)
        return None

    def _found(self, at: int, header: bytes) -> tuple[HeaderFinding, Plan]:
        digest = self._wanted[at].digest
        if self._expected.fits(header, digest):
            return HeaderFinding.SOUND, self._expected_plan
        finding = check_header(memoryview(header), digest, self._shape)
        sound = finding is HeaderFinding.SOUND
        return finding, self._shape.plan(presence_bits(header)) if sound else self._expected_plan

    def _judge(self, at: int, header: bytes, plan: Plan, checksums: bytes) -> None:
        """Record the outcome of an object: OK if its wanted parts have the checksums in its header."""
        start, sound = 0, True
        for run in plan.runs:
            end = start + len(run.parts) * CHECKSUM_BYTES
            sound &= check_run(header, run, checksums[start:end]) is HeaderFinding.SOUND
            start = end
        self._note(at, ReadOutcome.OK if sound else ReadOutcome.CORRUPT)
