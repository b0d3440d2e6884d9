"""Reads objects from a Mooncake Store into staging memory, and copies them to the caller.

The library never writes to the caller's memory, because its calls cannot be cancelled: a call may block
longer than the caller waits, and over RDMA bytes of an abandoned transfer may still arrive. Bytes are
staged, and copied out only while the caller's call is in progress (`Stop.touching`). The reader
verifies the copy, not the staged bytes, so late bytes cannot change verified data.

A thread uses its staging memory again only after the library has returned. After a failed transfer
whose bytes may still arrive, the memory is abandoned (`RegisteredMemory.write_off`). Once too much
memory was abandoned, reads are FAILED.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...page_format.object_header import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    PIECE_BYTES,
    HeaderFinding,
    PartHashes,
    check_header,
    presence_bits,
    stated_checksums,
)
from ...page_format.object_shape import ObjectShape, Plan
from ..base import ReadOutcome
from ..threaded_backend import Stop
from .client import MooncakeClient
from .memory import STAGING_BYTES, RegisteredMemory, StagingMemory, staging_views
from .names import WantedObject
from .pieces import BufferPiece, Code

_GONE = (Code.NOT_FOUND, Code.NOT_READY)


class _Place(NamedTuple):
    """The part of the staging memory that one object is read into, with its address."""

    address: int
    memory: memoryview


class StagedReads:
    """Reads the objects stored under given keys through one client. Thread-safe."""

    def __init__(self, client: MooncakeClient, memory: RegisteredMemory) -> None:
        self._client = client
        self._memory = memory

    def read(
        self, keys: Sequence[str], wanted: Sequence[WantedObject], stop: Stop
    ) -> list[ReadOutcome]:
        """Read all objects into their buffers, with one query to the master, and verify them."""
        if self._memory.is_used_up:
            return [ReadOutcome.FAILED] * len(keys)
        by_header: list[tuple[int, bytes]] = []
        with self._client.reading(list(keys)) as codes:
            outcomes = [_outcome(code or Code.NOT_TRANSFERRED) for code in codes]
            there = [at for at, code in enumerate(codes) if not code]
            for group in _groups(there, wanted):
                shapes = [wanted[at].shape for at in group]
                places = _places(shapes, self._memory.staging())
                pieces = list(map(_pieces, places, shapes))
                fetched = self._fetch([keys[at] for at in group], pieces, stop)
                for at, place, code in zip(group, places, fetched, strict=True):
                    copied = self._unstage(keys[at], wanted[at], place, code, stop)
                    if isinstance(copied, bytes):
                        by_header.append((at, copied))
                    else:
                        outcomes[at] = copied
            for at, header in by_header:
                outcomes[at] = self._read_by(header, keys[at], wanted[at], stop)
        return outcomes

    def header(self, key: str, stop: Stop) -> bytes | int:
        """Return an object's header, or a negative return code (INVALID if the object is too short)."""
        if self._memory.is_used_up:
            return Code.NOT_TRANSFERRED
        with self._client.reading([key]) as (found,):
            staging = self._memory.staging()
            code = found or self._fetch_header(key, staging.address, stop)
            return code if code < 0 else bytes(staging.memory[:HEADER_BYTES])

    def _unstage(
        self, key: str, want: WantedObject, place: _Place, code: int, stop: Stop
    ) -> ReadOutcome | bytes:
        """Copy an object's staged bytes to the caller, and return the outcome.

        Returns the object's header instead if the payload must be fetched separately: its layout is not
        the expected one, or the object is too long to be staged.
        """
        shape = want.shape
        is_staged = code >= 0 and _is_staged(shape)
        if code == Code.INVALID:
            code = self._fetch_header(key, place.address, stop)
        if code < 0:
            return _outcome(code)
        header = bytes(place.memory[:HEADER_BYTES])
        finding = check_header(memoryview(header), want.digest, shape)
        if finding is not HeaderFinding.SOUND:
            return ReadOutcome.LACKING if finding is HeaderFinding.LACKING else ReadOutcome.CORRUPT
        if not is_staged or presence_bits(header) != shape.present:
            return header
        plan = shape.plan(shape.present)
        hashes = PartHashes(plan.sizes)
        if not _copy_out(place.memory[HEADER_BYTES:], want.buffers, hashes, stop):
            return ReadOutcome.TIMED_OUT
        return _verdict(header, plan, hashes)

    def _read_by(self, header: bytes, key: str, want: WantedObject, stop: Stop) -> ReadOutcome:
        """Fetch the payload that `header` describes piece by piece, copy it out, and verify it."""
        plan = want.shape.plan(presence_bits(header))
        hashes = PartHashes(plan.sizes)
        staging = self._memory.staging()
        for offset, views in staging_views(want.buffers, plan):
            nbytes = sum(map(len, views))
            (code,) = self._fetch([key], [[BufferPiece(staging.address, nbytes, offset)]], stop)
            if code == Code.INVALID:
                code = self._why(key, HEADER_BYTES + plan.payload_bytes, stop)
            if code < 0:
                return _outcome(code)
            if not _copy_out(staging.memory[:nbytes], views, hashes, stop):
                return ReadOutcome.TIMED_OUT
        return _verdict(header, plan, hashes)

    def _fetch_header(self, key: str, address: int, stop: Stop) -> int:
        """Read a header into the memory at `address`; return a return code.

        The return code is INVALID if the object is too short to have a header.
        """
        (code,) = self._fetch([key], [[BufferPiece(address, HEADER_BYTES, 0)]], stop)
        return self._why(key, HEADER_BYTES, stop) if code == Code.INVALID else code

    def _fetch(
        self, keys: list[str], pieces: Sequence[Sequence[BufferPiece]], stop: Stop
    ) -> list[int]:
        codes = self._client.fetch(keys, pieces, stop)
        if self._client.may_be_late and Code.NOT_TRANSFERRED in codes:
            self._memory.write_off()
        return codes

    def _why(self, key: str, nbytes: int, stop: Stop) -> int:
        """Return the return code that explains why a read of `nbytes` failed.

        INVALID means that the object is shorter than `nbytes`. The client returns INVALID for an
        unreachable owner too, so this method asks the master for the object's length.
        """
        if stop.due():
            return Code.MASTER_LATE
        size = self._client.size(key)
        if size < 0:
            return size
        return Code.INVALID if size < nbytes else Code.NOT_TRANSFERRED


def _is_staged(shape: ObjectShape) -> bool:
    return HEADER_BYTES + shape.nbytes <= STAGING_BYTES


def _staged_bytes(shape: ObjectShape) -> int:
    return HEADER_BYTES + (shape.nbytes if _is_staged(shape) else 0)


def _groups(there: Sequence[int], wanted: Sequence[WantedObject]) -> Iterator[list[int]]:
    """Divide the indices `there` into groups whose objects fit into the staging memory."""
    group: list[int] = []
    room = STAGING_BYTES
    for at in there:
        nbytes = _staged_bytes(wanted[at].shape)
        if group and nbytes > room:
            yield group
            group, room = [], STAGING_BYTES
        group.append(at)
        room -= nbytes
    if group:
        yield group


def _places(shapes: Sequence[ObjectShape], staging: StagingMemory) -> list[_Place]:
    """Return one part of the staging memory for each object of a group, without gaps."""
    places: list[_Place] = []
    at = 0
    for shape in shapes:
        end = at + _staged_bytes(shape)
        places.append(_Place(staging.address + at, staging.memory[at:end]))
        at = end
    return places


def _pieces(place: _Place, shape: ObjectShape) -> list[BufferPiece]:
    """Return the pieces of an object to stage: its header and the wanted parts, joined if adjacent.

    If the object has exactly the reader's columns, and all are wanted, the result is a single piece.
    """
    address = place.address
    if not _is_staged(shape):
        return [BufferPiece(address, HEADER_BYTES, 0)]
    at, end, pieces = 0, HEADER_BYTES, list[BufferPiece]()
    for run in shape.plan(shape.present).runs:
        start = HEADER_BYTES + run.offset
        if start != end:
            pieces.append(BufferPiece(address, end - at, at))
            address, at = address + end - at, start
        end = start + run.nbytes
    return [*pieces, BufferPiece(address, end - at, at)]


def _copy_out(
    staged: memoryview, views: Sequence[memoryview], hashes: PartHashes, stop: Stop
) -> bool:
    """Copy staged bytes to the caller's views and hash the copy.

    Returns False, and copies nothing, if the caller's call has ended.
    """
    with stop.touching() as wanted:
        at = 0
        for view in views if wanted else ():
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                piece[:] = staged[at : at + len(piece)]
                hashes.add(piece)
                at += len(piece)
    return wanted


def _verdict(header: bytes, plan: Plan, hashes: PartHashes) -> ReadOutcome:
    found, at = hashes.joined(), 0
    for run in plan.runs:
        end = at + len(run.parts) * CHECKSUM_BYTES
        if found[at:end] != stated_checksums(header, run.parts[0][0], len(run.parts)):
            return ReadOutcome.CORRUPT
        at = end
    return ReadOutcome.OK


def _outcome(code: int) -> ReadOutcome:
    if code in _GONE:
        return ReadOutcome.MISSING
    if code == Code.INVALID:
        return ReadOutcome.CORRUPT
    return ReadOutcome.TIMED_OUT if code == Code.MASTER_LATE else ReadOutcome.FAILED
