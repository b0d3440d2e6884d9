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
from .wire import Ask, Fetch, Pages, State

_GROUP_BYTES: Final = 256 << 10
"""As many objects are received together, and hashed while they are still in a core's cache."""
_PIECE_BYTES: Final = 256 << 10
"""The same for the pieces of an object that is larger."""


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

    def is_abandoned(self) -> bool:
        """Say whether nobody wants it any more."""
        return self._is_abandoned

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
        self._expected_plan = shape.plan(shape.present)
        self.outcomes: list[ReadOutcome | None] = [None] * len(wanted)
        self._answered = 0
        self._received: list[tuple[int, ReadOutcome]] = []
        """Outcomes of objects by their positions, before it is known that they are authentic."""
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

        It counts from `take` on. What was yielded is not written to before more is asked for, unless
        the request is abandoned. Raises `StorageError` if these are not the next objects of this
        request, or not as long as they have to be.
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

    def take(self, pages: Pages) -> None:
        """Let what was received of `pages` count."""
        for at, outcome in self._received:
            self.outcomes[at] = outcome
        self._received.clear()
        self._answered = pages.first + len(pages.states)

    def _receive_group(self, group: Sequence[tuple[int, int]]) -> Generator[Sinks, None, None]:
        """Receive objects that are small together, and check them while a core still has them."""
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
        """Receive one object piece by piece, each of which is hashed when it is there."""
        if self.is_abandoned():
            yield scratch(self._sent_bytes(state))
            return
        header = bytearray(HEADER_BYTES)
        nbytes = self._sent_bytes(state) - HEADER_BYTES
        pieces = [min(_PIECE_BYTES, nbytes - done) for done in range(0, nbytes, _PIECE_BYTES)]
        # The header comes with the first piece: what is in the buffers of a bad one is undefined.
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

    def sound_plan(self, at: int, header: bytes) -> Plan | None:
        """Return where in an object with this header its wanted parts lie; None if it is not sound."""
        finding, plan = self._found(at, header)
        return plan if finding is HeaderFinding.SOUND else None

    def _checked(self, at: int, state: int, header: bytes) -> Plan | None:
        """Note what the header of an object says; return where its wanted parts lie if that is well."""
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
        """Note whether these are the checksums that the header states for the wanted parts."""
        start, sound = 0, True
        for run in plan.runs:
            end = start + len(run.parts) * CHECKSUM_BYTES
            sound &= check_run(header, run, checksums[start:end]) is HeaderFinding.SOUND
            start = end
        self._note(at, ReadOutcome.OK if sound else ReadOutcome.CORRUPT)
