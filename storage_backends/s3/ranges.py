"""Chooses the ranges of an S3 object to request, and verifies the bytes that were received.

Nearby ranges are joined into one request, because a request costs money and a round trip, while extra
bytes cost only a little time. This module does no I/O.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...page_format.object_header import (
    HEADER_BYTES,
    PIECE_BYTES,
    HeaderFinding,
    PartHashes,
    check_header,
    presence_bits,
    stated_checksums,
)
from ...page_format.object_shape import ObjectShape, pieces_of

GAP_BYTES_MAX: Final = 64 << 10
"""Two ranges are joined if at most this number of unneeded bytes lies between them. A request takes
some 20 ms and a connection transfers some 100 MB/s, so reading these bytes is faster than another
request."""
REQUEST_BYTES_MAX: Final = 8 << 20
"""Maximum bytes of joined ranges. Larger reads are faster as several requests on several connections.
"""


class Range(NamedTuple):
    """A range of bytes, from `start` up to, but not including, `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Ranges of one version of an S3 object, as the store returned them."""

    pieces: tuple[tuple[int, memoryview], ...]
    """(offset, bytes) of each range, by ascending offset."""
    size: int
    """The length of the whole S3 object in bytes."""
    e_tag: str | None
    """The version of the S3 object (its ETag)."""

    def cut(self, start: int, end: int) -> memoryview | None:
        """Return the bytes from `start` to `end`; None if some of them were not fetched.

        A range beyond the object's end is cut off there.
        """
        end = min(end, self.size)
        if end <= start:
            return memoryview(b"")
        at = bisect_right(self.pieces, start, key=lambda piece: piece[0]) - 1
        if at < 0:
            return None
        begin, piece = self.pieces[at]
        cut = piece[start - begin : end - begin]
        return cut if len(cut) == end - start else None


class Elsewhere(NamedTuple):
    """The object has other columns than expected, so other ranges of it must be fetched."""

    present: int


def wanted_ranges(shape: ObjectShape, present: int) -> list[Range]:
    """Return the ranges to request: the header, and the parts of `shape`.

    The presence bits `present` of the object determine where the parts are.
    """
    start = HEADER_BYTES
    runs = shape.plan(present).runs
    return [
        Range(0, start),
        *(Range(start + run.offset, start + run.offset + run.nbytes) for run in runs if run.nbytes),
    ]


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Join nearby ranges; return ascending ranges that contain all of `ranges`."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined:
            begin, until = joined[-1]
            near = start <= until or (
                start - until <= GAP_BYTES_MAX and max(until, end) - begin <= REQUEST_BYTES_MAX
            )
            if near:
                joined[-1] = Range(begin, max(until, end))
                continue
        joined.append(Range(start, end))
    return joined


def copy_object(
    fetched: Fetched,
    digest: bytes,
    buffers: Sequence[memoryview],
    shape: ObjectShape,
) -> HeaderFinding | Elsewhere:
    """Fill `buffers` with the parts of `shape` of the object with this digest, and verify them.

    Returns `Elsewhere` if `fetched` lacks some of the parts. The caller must then fetch the
    `wanted_ranges` for the presence bits in the result and call again.
    """
    header = fetched.cut(0, HEADER_BYTES)
    if header is None:
        return Elsewhere(shape.present)
    finding = check_header(header, digest, shape)
    if finding is not HeaderFinding.SOUND:
        return finding
    present = presence_bits(header)
    plan = shape.plan(present)
    length = HEADER_BYTES + plan.payload_bytes
    if fetched.size != length:
        return HeaderFinding.SHORT if fetched.size < length else HeaderFinding.LONG
    targets = pieces_of(buffers, [run.nbytes for run in plan.runs])
    for run, views in zip(plan.runs, targets, strict=True):
        start = HEADER_BYTES + run.offset
        source = fetched.cut(start, start + run.nbytes)
        if source is None:
            return Elsewhere(present)
        hashes = PartHashes([nbytes for _, nbytes in run.parts])
        _copy(source, views, hashes)
        if hashes.joined() != stated_checksums(header, run.parts[0][0], len(run.parts)):
            return HeaderFinding.PAYLOAD
    return HeaderFinding.SOUND


def _copy(source: memoryview, views: Iterable[memoryview], hashes: PartHashes) -> None:
    """Copy the bytes into the views, and hash the copies while they are in the core's cache."""
    at = 0
    for view in views:
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            piece[:] = source[at : at + len(piece)]
            hashes.add(piece)
            at += len(piece)
