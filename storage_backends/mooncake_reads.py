"""Reading objects out of a Mooncake Store: the blocking half, called from several threads.

An object lies under the key of its *generation*. Generation 0 is what the first writer stored. An
object is never changed: one with more columns is stored under the next generation, and then those
before it are removed. So whoever finds an object gone or lacking looks for a later one, and each is
whole at any time. No generation is stored twice (`mooncake_writes` says how).

Memory of a removed object may be given to another one while somebody reads. Checksums find that, and
a reader takes an object for corrupt only after it has found so twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .base import ReadOutcome
from .mooncake_client import MooncakeClient
from .mooncake_memory import ROOM_BYTES, RegisteredMemory, address_of
from .mooncake_pieces import Code, Piece
from .object_shape import ALWAYS, ObjectShape, Plan, pieces_of
from .page_object import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Finding,
    check_header,
    part_checksums,
    presence_bits,
    stated_checksums,
)
from .thread_calls import Stop

GENERATIONS: Final = 8
"""Each has a column more than the one before, so this bounds the optional columns of a page."""
_TRIES: Final = 8
"""Each is lost only to somebody who has replaced or removed the object meanwhile."""
_GONE: Final = (Code.NOT_FOUND, Code.NOT_READY)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What somebody reads or writes: the buffers are views of bytes, none of them empty."""

    digest: bytes
    buffers: list[memoryview]
    shape: ObjectShape

    @property
    def last_generation(self) -> int:
        """The last that there can be, since each has an optional column more than the one before."""
        columns = {part.bit for part in self.shape.parts if part.bit != ALWAYS}
        return min(len(columns), GENERATIONS - 1)


class Look(NamedTuple):
    """What the header of an object says."""

    code: int
    """Negative if it could not be read."""
    finding: Finding = Finding.SOUND
    present: int = 0


def key_of(digest: bytes, generation: int = 0) -> str:
    """Return the key of an object in the store."""
    later = f".{generation}" if generation else ""
    return f"lockstep/v{FORMAT_VERSION}/{digest.hex()}{later}"


class ObjectReader:
    """Reads through one client. Thread-safe."""

    def __init__(self, client: MooncakeClient, memory: RegisteredMemory) -> None:
        self._client = client
        self._memory = memory

    def latest(self, digests: Sequence[bytes]) -> list[int | None]:
        """Return the last generation of each object that seems to be there: a hint.

        While an object is being replaced none of it may be seen, or one that is not the last.
        """
        keys = [key_of(digest, each) for digest in digests for each in range(GENERATIONS)]
        found = self._client.exist(keys) if keys else []
        return [
            max((each for each in range(GENERATIONS) if found[at + each]), default=None)
            for at in range(0, len(found), GENERATIONS)
        ]

    def later(self, wanted: Sequence[Wanted], generation: int) -> list[int]:
        """Return the last generation after this one of each object, 0 if there is none.

        Negative is the code of a master that does not say. None is overlooked that there was when
        the call began, unless a later one is found: whatever took its place is asked for after it,
        which takes a question for each generation.
        """
        found = [0] * len(wanted)
        for each in range(generation + 1, GENERATIONS):
            asked = [
                at
                for at, want in enumerate(wanted)
                if each <= want.last_generation and found[at] >= 0
            ]
            if not asked:
                break
            codes = self._client.presence([key_of(wanted[at].digest, each) for at in asked])
            for at, code in zip(asked, codes, strict=True):
                if code:
                    found[at] = each if code == 1 else min(code, -1)
        return found

    def read(self, wanted: Sequence[Wanted], stop: Stop) -> list[ReadOutcome]:
        """Fill the buffers of as many objects as there are header blocks, and verify them."""
        outcomes = self._read([key_of(each.digest) for each in wanted], wanted, stop)
        doubtful = (ReadOutcome.MISSING, ReadOutcome.LACKING, ReadOutcome.CORRUPT)
        open_ends = [
            at
            for at, outcome in enumerate(outcomes)
            if outcome is ReadOutcome.CORRUPT
            or (outcome in doubtful and wanted[at].last_generation)
        ]
        latest = self.later([wanted[at] for at in open_ends], 0)
        for at, generation in zip(open_ends, latest, strict=True):
            outcomes[at] = self._settle(wanted[at], outcomes[at], generation, stop)
        return outcomes

    def read_at(self, want: Wanted, generation: int, stop: Stop) -> ReadOutcome:
        """Fill the buffers from this generation of an object; what is corrupt is removed."""
        outcome = ReadOutcome.CORRUPT
        for _ in range(2):
            if stop.due():
                return ReadOutcome.TIMED_OUT
            (outcome,) = self._read([key_of(want.digest, generation)], [want], stop)
            if outcome is not ReadOutcome.CORRUPT:
                return outcome
        self._client.remove([key_of(want.digest, generation)])
        return outcome

    def look(self, want: Wanted, generation: int, stop: Stop) -> Look:
        """Return how the header compares with what is wanted."""
        key = key_of(want.digest, generation)
        with self._client.reading([key]) as (found,):
            code = found or self._fetch_header(key, 0, stop)
        if code < 0:
            short = code == Code.INVALID
            return Look(0, Finding.SHORT) if short else Look(code)
        block = self._memory.staging().block(0)
        finding = check_header(block, want.digest, want.shape)
        there = finding in (Finding.SOUND, Finding.LACKING)
        return Look(0, finding, presence_bits(block) if there else 0)

    def _settle(
        self, want: Wanted, outcome: ReadOutcome, generation: int, stop: Stop
    ) -> ReadOutcome:
        """Return what becomes of an object of which generation 0 gave `outcome`.

        `generation` is what `later` says of it.
        """
        seen = 0
        for _ in range(_TRIES):
            if generation < 0:
                return ReadOutcome.FAILED
            # What was corrupt may be the remains of something that was just removed.
            if generation == seen and outcome is not ReadOutcome.CORRUPT:
                return outcome
            outcome, seen = self.read_at(want, generation, stop), generation
            if outcome is not ReadOutcome.MISSING:
                return outcome
            (after,) = self.later([want], generation)
            generation = after or generation
        return outcome

    def _read(self, keys: list[str], wanted: Sequence[Wanted], stop: Stop) -> list[ReadOutcome]:
        """Read one generation of each object, with one question to the master for all."""
        staging = self._memory.staging()
        with self._client.reading(keys) as codes:
            there = [at for at, code in enumerate(codes) if not code]
            straight = {at for at in there if self._memory.covers(wanted[at].buffers)}
            pieces: list[list[Piece]] = []
            for at in there:
                header = Piece(staging.block_address(at), HEADER_BYTES, 0)
                shape = wanted[at].shape
                # Nearly always the object has the reader's own columns.
                plan = shape.plan(shape.present)
                rest = _straight(wanted[at], plan) if at in straight else []
                pieces.append([header, *rest])
            fetched = self._client.fetch([keys[at] for at in there], pieces, stop)
            outcomes = [_outcome(code or Code.NOT_TRANSFERRED) for code in codes]
            for at, code in zip(there, fetched, strict=True):
                outcomes[at] = self._check(
                    keys[at], wanted[at], at, code, straight=at in straight, stop=stop
                )
        return outcomes

    def _check(
        self, key: str, want: Wanted, number: int, code: int, *, straight: bool, stop: Stop
    ) -> ReadOutcome:
        """Verify what was fetched of an object, and fetch what is missing of it."""
        filled = straight and code >= 0
        if code == Code.INVALID:
            code = self._fetch_header(key, number, stop)
        if code < 0:
            return _outcome(code)
        block, shape = self._memory.staging().block(number), want.shape
        finding = check_header(block, want.digest, shape)
        if finding is not Finding.SOUND:
            return ReadOutcome.LACKING if finding is Finding.LACKING else ReadOutcome.CORRUPT
        present = presence_bits(block)
        plan = shape.plan(present)
        if not filled or present != shape.present:
            code = self._fill(key, want, plan, straight, stop)
            if code == Code.INVALID:
                code = self._why(key, HEADER_BYTES + plan.payload_bytes, stop)
            if code < 0:
                return _outcome(code)
        return ReadOutcome.OK if _sound(block, want, plan) else ReadOutcome.CORRUPT

    def _fetch_header(self, key: str, number: int, stop: Stop) -> int:
        """Fetch a header into the block with this number; INVALID means that there is none."""
        header = Piece(self._memory.staging().block_address(number), HEADER_BYTES, 0)
        (code,) = self._client.fetch([key], [[header]], stop)
        return self._why(key, HEADER_BYTES, stop) if code == Code.INVALID else code

    def _why(self, key: str, nbytes: int, stop: Stop) -> int:
        """Return INVALID if the object is shorter than this, or else why it could not be fetched.

        The client answers with the same code where the object's owner cannot be reached.
        """
        if stop.due():
            return Code.MASTER_LATE
        size = self._client.size(key)
        if size < 0:
            return size
        return Code.INVALID if size < nbytes else Code.NOT_TRANSFERRED

    def _fill(self, key: str, want: Wanted, plan: Plan, straight: bool, stop: Stop) -> int:
        """Fetch the payload; return a negative code if that fails."""
        if straight:
            (code,) = self._client.fetch([key], [_straight(want, plan)], stop)
            return code
        staging = self._memory.staging()
        for offset, views in in_rooms(want.buffers, plan):
            piece = Piece(staging.room_address, sum(map(len, views)), offset)
            (code,) = self._client.fetch([key], [[piece]], stop)
            if code < 0:
                return code
            at = 0
            for view in views:
                view[:] = staging.room[at : at + len(view)]
                at += len(view)
        return 0


def in_rooms(buffers: Sequence[memoryview], plan: Plan) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield views of the buffers that fit in a room, each with its place in the object."""
    for run, views in zip(plan.runs, pieces_of(buffers, _run_bytes(plan)), strict=True):
        whole, rest = divmod(run.nbytes, ROOM_BYTES)
        steps = [ROOM_BYTES] * whole + [rest] * bool(rest)
        at = HEADER_BYTES + run.offset
        for some in pieces_of(views, steps):
            yield at, some
            at += sum(map(len, some))


def _straight(want: Wanted, plan: Plan) -> list[Piece]:
    pieces: list[Piece] = []
    for run, views in zip(plan.runs, pieces_of(want.buffers, _run_bytes(plan)), strict=True):
        at = HEADER_BYTES + run.offset
        for view in views:
            pieces.append(Piece(address_of(view), len(view), at))
            at += len(view)
    return pieces


def _sound(block: memoryview, want: Wanted, plan: Plan) -> bool:
    for run, views in zip(plan.runs, pieces_of(want.buffers, _run_bytes(plan)), strict=True):
        stated = stated_checksums(block, run.parts[0][0], len(run.parts))
        if part_checksums([nbytes for _, nbytes in run.parts], views) != stated:
            return False
    return True


def _run_bytes(plan: Plan) -> list[int]:
    return [run.nbytes for run in plan.runs]


def _outcome(code: int) -> ReadOutcome:
    if code in _GONE:
        return ReadOutcome.MISSING
    if code == Code.INVALID:
        return ReadOutcome.CORRUPT
    return ReadOutcome.TIMED_OUT if code == Code.MASTER_LATE else ReadOutcome.FAILED
