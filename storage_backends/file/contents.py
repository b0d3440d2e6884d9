"""Reads and writes the bytes of object files through open file descriptors.

A file is the object's header (one block of 4096 bytes) and then the payload. Reads go directly into the
caller's memory, in pieces that are hashed while they are in the core's cache.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final

from ...page_format.object_header import (
    HEADER_BYTES,
    PIECE_BYTES,
    HeaderFinding,
    PartHashes,
    check_header,
    check_run,
    encode_header,
    is_expected,
    part_checksums,
    presence_bits,
)
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape, Plan, pieces_of
from ..buffers import move_all
from ..threaded_backend import Stop

BLOCK_BYTES: Final = HEADER_BYTES
_BUFFERS_AT_ONCE: Final = 64
"""Maximum number of buffers for reading header and payload with a single system call. With more
buffers, a single call would not be faster than several."""
_DIRECT_PIECE_BYTES: Final = 16 << 20
"""Maximum bytes read or written at once with direct I/O; large enough to keep the device busy."""


def file_bytes(shape: ObjectShape) -> int:
    """Return the bytes that an object's file takes on disk, in whole blocks."""
    return BLOCK_BYTES * (1 + -(-shape.nbytes // BLOCK_BYTES))


class FileContents:
    """Reads and writes object files; each thread has its own scratch memory.

    All methods raise OSError if a system call fails. `direct` says that the file was opened with
    O_DIRECT.
    """

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def read(
        self,
        fd: int,
        digest: bytes,
        buffers: Sequence[memoryview],
        shape: ObjectShape,
        stop: Stop,
        *,
        direct: bool,
    ) -> HeaderFinding | None:
        """Fill `buffers` with the parts of `shape` of the object in this file, and verify them.

        `digest` is that of the object's name. Returns SOUND if the buffers hold the verified bytes.
        Returns LACKING, after reading only the header, if the object lacks a column. Returns another
        finding if the file is corrupt, and None if `stop` was due.
        """
        scratch, plan = self._scratch, shape.plan(shape.present)
        block, nbytes = scratch.block, plan.payload_bytes
        # Read the whole file with one system call if the reader wants all parts of the object, as is
        # usual. Equal lengths do not prove that, because a part without bytes may be unwanted. So the
        # wanted parts must also be one contiguous run.
        at_once = (
            shape.nbytes == nbytes and len(plan.runs) == 1 and len(buffers) <= _BUFFERS_AT_ONCE
        )
        if at_once and direct and nbytes <= _DIRECT_PIECE_BYTES:
            got = os.preadv(fd, [block, *buffers], 0)
            at_once = os.fstat(fd).st_size == got
        elif at_once and not direct and nbytes <= PIECE_BYTES:
            got = os.preadv(fd, [block, *buffers, scratch.byte], 0)
        else:
            at_once = False
            got = os.preadv(fd, [block], 0)
        if at_once and got == BLOCK_BYTES + nbytes and is_expected(block, digest, shape):
            return check_run(block, plan.runs[0], part_checksums(plan.sizes, buffers))
        if got < BLOCK_BYTES:
            got = _read_fully(fd, [block], 0, direct=direct)
        finding = check_header(block[:got], digest, shape)
        if finding is not HeaderFinding.SOUND:
            return finding
        return self._pick(fd, buffers, shape.plan(presence_bits(block)), stop, direct=direct)

    def look(self, fd: int, digest: bytes, shape: ObjectShape) -> tuple[HeaderFinding, int]:
        """Return (finding, presence bits) of an object's file.

        Compares the header and the length of the file with `shape`. The file must be open without
        O_DIRECT. The bits are 0 if the file is not a valid object.
        """
        block = self._scratch.block
        got = _read_fully(fd, [block], 0, direct=False)
        finding = check_header(block[:got], digest, shape)
        if finding not in (HeaderFinding.SOUND, HeaderFinding.LACKING):
            return finding, 0
        present = presence_bits(block)
        expected = BLOCK_BYTES + shape.payload_bytes(present)
        size = os.fstat(fd).st_size
        if size != expected:
            return HeaderFinding.SHORT if size < expected else HeaderFinding.LONG, 0
        return finding, present

    def header(self, fd: int) -> memoryview:
        """Return the first block of a file; shorter if the file is shorter.

        The memory is valid until this thread's next call.
        """
        block = self._scratch.block
        return block[: _read_fully(fd, [block], 0, direct=False)]

    def unite(
        self, fd: int, buffers: Sequence[memoryview], shape: ObjectShape, present: int, stop: Stop
    ) -> memoryview | None:
        """Return a payload with the columns in `buffers`, and the other columns of the object in `fd`.

        This thread's last call must have been `look` with the same `fd`; `present` are the presence
        bits that it returned. Returns None if the existing payload is corrupt or `stop` was due.
        """
        whole = shape.of_columns(present)
        room = self._scratch.room(whole.nbytes)
        finding = self._pick(fd, [room], whole.plan(present), stop, direct=False)
        return shape.unite(buffers, room, present) if finding is HeaderFinding.SOUND else None

    def write(
        self,
        fd: int,
        name: ObjectName,
        digest: bytes,
        buffers: Sequence[memoryview],
        shape: ObjectShape,
        *,
        stop: Stop,
        direct: bool,
    ) -> bool:
        """Write the whole file from the caller's buffers, which have all parts of `shape`.

        Returns False if `stop` was due; the file then has no header.
        """
        plan = shape.plan(shape.present)
        piece_bytes = _DIRECT_PIECE_BYTES if direct else PIECE_BYTES
        if plan.payload_bytes <= piece_bytes:
            checksums = part_checksums(plan.sizes, buffers)
            header: bytes | memoryview = encode_header(name, digest, shape.present, plan, checksums)
            if direct:
                header = self._aligned(header)
            _write_fully(fd, [header, *buffers], 0)
            return True
        # Write the header last, because it contains the checksums of the payload. The file has no name
        # until both are written. Hash each piece after writing it, because the write has brought the
        # piece into the cache.
        at = BLOCK_BYTES
        hashes = PartHashes(plan.sizes)
        for views in pieces_of(buffers, _steps(plan.payload_bytes, piece_bytes)):
            if stop.due():
                return False
            at += _write_fully(fd, views, at)
            for view in views:
                hashes.add(view)
        header = encode_header(name, digest, shape.present, plan, hashes.joined())
        _write_fully(fd, [self._aligned(header) if direct else header], 0)
        return True

    def _aligned(self, header: bytes | memoryview) -> memoryview:
        """Return a copy of the header in this thread's aligned block, as direct I/O requires."""
        block = self._scratch.block
        block[:] = header
        return block

    def _pick(
        self, fd: int, buffers: Sequence[memoryview], plan: Plan, stop: Stop, *, direct: bool
    ) -> HeaderFinding | None:
        """Read the parts in `plan` into `buffers`, after the caller has checked the header.

        The header must be in this thread's block.
        """
        block = self._scratch.block
        size = os.fstat(fd).st_size - BLOCK_BYTES
        if size != plan.payload_bytes:
            return HeaderFinding.SHORT if size < plan.payload_bytes else HeaderFinding.LONG
        if direct and any(
            run.offset % BLOCK_BYTES or run.nbytes % BLOCK_BYTES for run in plan.runs
        ):
            # Switch off direct I/O for this file, because direct I/O cannot read a run of bytes that
            # begins or ends within a block.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            direct = False
        piece_bytes = _DIRECT_PIECE_BYTES if direct else PIECE_BYTES
        of_runs = pieces_of(buffers, [run.nbytes for run in plan.runs])
        for run, target in zip(plan.runs, of_runs, strict=True):
            hashes = PartHashes([nbytes for _, nbytes in run.parts])
            at = BLOCK_BYTES + run.offset
            for views in pieces_of(target, _steps(run.nbytes, piece_bytes)):
                if stop.due():
                    return None
                end = at + sum(map(len, views))
                if at + _read_fully(fd, views, at, direct=direct) != end:
                    return HeaderFinding.SHORT
                at = end
                for view in views:
                    hashes.add(view)
            if check_run(block, run, hashes.joined()) is not HeaderFinding.SOUND:
                return HeaderFinding.PAYLOAD
        return HeaderFinding.SOUND


class _Scratch(threading.local):
    """Aligned scratch memory of one thread, for one header and one payload."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
        self.block = memory[:BLOCK_BYTES]
        """Memory for the header block of a file."""
        self.byte = memory[BLOCK_BYTES : BLOCK_BYTES + 1]
        """Memory for one byte after the payload. If a read fills it, the file is longer than the
        object."""
        self._room = memory[:0]

    def room(self, nbytes: int) -> memoryview:
        """Return `nbytes` of this thread's scratch memory for a payload.

        The next call reuses the memory.
        """
        if len(self._room) < nbytes:
            self._room = memoryview(mmap.mmap(-1, nbytes))
        return self._room[:nbytes]


def _steps(nbytes: int, piece_bytes: int) -> list[int]:
    """Return the lengths of the pieces into which `nbytes` are cut, each at most `piece_bytes`."""
    whole, rest = divmod(nbytes, piece_bytes)
    return [piece_bytes] * whole + ([rest] if rest else [])


def _read_fully(fd: int, views: Sequence[memoryview], offset: int, *, direct: bool) -> int:
    """Fill `views` from the file position `offset` until they are full or the file ends.

    Returns the number of bytes read.
    """
    # Stop: a direct read that ends within a block has reached the end of the file, and no further
    # direct read can start there.
    return move_all(os.preadv, fd, views, offset, BLOCK_BYTES if direct else 1)


def _write_fully(fd: int, pieces: Sequence[memoryview | bytes], offset: int) -> int:
    size = sum(map(len, pieces))
    if move_all(os.pwritev, fd, pieces, offset) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return size
