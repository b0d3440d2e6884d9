"""What is in an object's file, read and written through an open descriptor.

A file is one block of 4096 bytes, which begins with the header and goes on with zeros, and then the
payload. So the payload is aligned for direct I/O and for the page cache, and since filesystems
store whole blocks, it takes no more room than a short header would.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final

from .optional_columns import OptionalColumns
from .page_object import (
    HEADER_BYTES,
    PIECE_BYTES,
    Finding,
    check_header,
    check_payload,
    encode_header,
    join_checksums,
    payload_checksum,
    piece_checksum,
    presence_bits,
)
from .thread_calls import Stop

BLOCK_BYTES: Final = 4096
_PADDING: Final = bytes(BLOCK_BYTES - HEADER_BYTES)


class FileContents:
    """Reads and writes files; each thread has memory of its own for what is not the caller's.

    That is two blocks, and as much as the longest payload of other columns than the caller's. All
    methods raise OSError for what the kernel refuses. `direct` says that the file was opened so.
    """

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def read(
        self,
        fd: int,
        digest: bytes,
        target: memoryview,
        optional: OptionalColumns,
        stop: Stop,
        *,
        direct: bool,
    ) -> Finding | None:
        """Fill `target` from the object with this name digest, and check it.

        SOUND if `target` holds its bytes; LACKING if the object has too few columns, and then only
        its header was looked at; None if it had to stop on the way.
        """
        size = target.nbytes
        block, tail = self._scratch.block, self._scratch.tail if direct else self._scratch.byte
        # Direct reads are bound by the device and not by the cache, so they go in one piece.
        step = size if direct else PIECE_BYTES
        views = [block, target[:step], tail] if size <= step else [block, target[:step]]
        needed = BLOCK_BYTES + min(step, size)
        got = _read_fully(fd, views, 0, needed, direct=direct)
        finding = _check_block(block[:got], digest, size, optional)
        if finding is Finding.FULLER:
            return None if stop.due() else self._pick(fd, block, target, optional, direct=direct)
        if finding is not Finding.SOUND:
            return finding
        if size <= step:
            if got != needed:
                return Finding.SHORT if got < needed else Finding.LONG
            return check_payload(block, payload_checksum(target))
        if got < needed:
            return Finding.SHORT
        checksums = [piece_checksum(target[:step])]
        for start in range(step, size, step):
            if stop.due():
                return None
            piece = target[start : start + step]
            views = [piece] if start + step < size else [piece, tail]
            got = _read_fully(fd, views, BLOCK_BYTES + start, piece.nbytes, direct=direct)
            if got != piece.nbytes:
                return Finding.SHORT if got < piece.nbytes else Finding.LONG
            checksums.append(piece_checksum(piece))
        return check_payload(block, join_checksums(checksums))

    def look(
        self, fd: int, digest: bytes, buffer_bytes: int, optional: OptionalColumns
    ) -> tuple[Finding, int]:
        """Return how the object's columns compare with a buffer's, and its presence bits.

        Looks at the header and the length of the file, which was opened without O_DIRECT. The bits
        are 0 for what is no object.
        """
        block = self._scratch.block
        got = _read_fully(fd, [block], 0, BLOCK_BYTES, direct=False)
        finding = _check_block(block[:got], digest, buffer_bytes, optional)
        if finding not in (Finding.SOUND, Finding.FULLER, Finding.LACKING):
            return finding, 0
        present = presence_bits(block)
        expected = BLOCK_BYTES + optional.payload_bytes(buffer_bytes, present)
        size = os.fstat(fd).st_size
        if size != expected:
            return Finding.SHORT if size < expected else Finding.LONG, 0
        return finding, present

    def unite(
        self, fd: int, payload: memoryview, optional: OptionalColumns, present: int
    ) -> memoryview | None:
        """Return `payload` with the columns that the object has beside its own.

        `optional` says which those are. The object is the one of the last `look` on this thread,
        where it had the bits `present`. None if its payload is not sound.
        """
        nbytes = optional.payload_bytes(payload.nbytes, present)
        finding, theirs = self._payload(fd, self._scratch.block, nbytes, direct=False)
        return optional.unite(payload, theirs, present) if finding is Finding.SOUND else None

    def write(
        self, fd: int, digest: bytes, payload: memoryview, present: int, *, direct: bool
    ) -> None:
        """Write the whole file."""
        header = encode_header(digest, payload.nbytes, payload_checksum(payload), present)
        views: list[memoryview | bytes] = [header, _PADDING, payload]
        if direct:
            block = self._scratch.block
            block[:HEADER_BYTES] = header
            block[HEADER_BYTES:] = _PADDING
            views = [block, payload]
        size = BLOCK_BYTES + payload.nbytes
        done = os.pwritev(fd, views, 0)
        while done < size:
            count = os.pwritev(fd, _skip(views, done), done)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count

    def _pick(
        self,
        fd: int,
        block: memoryview,
        target: memoryview,
        optional: OptionalColumns,
        *,
        direct: bool,
    ) -> Finding:
        """Fill `target` from an object that has more, whose block was checked."""
        present = presence_bits(block)
        nbytes = optional.payload_bytes(target.nbytes, present)
        finding, payload = self._payload(fd, block, nbytes, direct=direct)
        if finding is Finding.SOUND:
            optional.pick(payload, present, target)
        return finding

    def _payload(
        self, fd: int, block: memoryview, nbytes: int, *, direct: bool
    ) -> tuple[Finding, memoryview]:
        """Read a whole payload of this length; the memory is this thread's until its next call."""
        # Room for a byte that must not be there, in whole blocks, as direct I/O wants it.
        room = self._scratch.room((nbytes // BLOCK_BYTES + 1) * BLOCK_BYTES)
        got = _read_fully(fd, [room], BLOCK_BYTES, nbytes, direct=direct)
        payload = room[:nbytes]
        if got != nbytes:
            return Finding.SHORT if got < nbytes else Finding.LONG, payload
        return check_payload(block, payload_checksum(payload)), payload


class _Scratch(threading.local):
    """Each thread's own aligned memory."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
        self.block = memory[:BLOCK_BYTES]
        """For a header block."""
        self.tail = memory[BLOCK_BYTES:]
        """For what follows a payload."""
        self.byte = self.tail[:1]
        self._room = memory[:0]

    def room(self, nbytes: int) -> memoryview:
        """Return memory for a payload; the same each time, unless it was too short."""
        if len(self._room) < nbytes:
            self._room = memoryview(mmap.mmap(-1, nbytes))
        return self._room[:nbytes]


def _check_block(
    block: memoryview, digest: bytes, buffer_bytes: int, optional: OptionalColumns
) -> Finding:
    """Check what was read of a file's first block; see `check_header`."""
    if len(block) < BLOCK_BYTES:
        return Finding.SHORT
    finding = check_header(block[:HEADER_BYTES], digest, buffer_bytes, optional)
    if finding not in (Finding.SOUND, Finding.FULLER, Finding.LACKING):
        return finding
    return finding if bytes(block[HEADER_BYTES:]) == _PADDING else Finding.HEADER


def _read_fully(
    fd: int, views: Sequence[memoryview], offset: int, needed: int, *, direct: bool
) -> int:
    """Fill `views` from `offset` until `needed` bytes are there or the file ends.

    A regular file gives all there is in one call, also the byte behind `needed` that must not be.
    """
    got = os.preadv(fd, views, offset)
    while got < needed:
        # Direct I/O ends off a block only at the end of the file, and cannot go on from there.
        if direct and got % BLOCK_BYTES:
            break
        count = os.preadv(fd, _skip(views, got), offset + got)
        if count == 0:
            break
        got += count
    return got


def _skip(views: Sequence[memoryview | bytes], count: int) -> list[memoryview | bytes]:
    """Return `views` without their first `count` bytes."""
    rest: list[memoryview | bytes] = []
    for view in views:
        skipped = min(count, len(view))
        count -= skipped
        if skipped < len(view):
            rest.append(memoryview(view)[skipped:])
    return rest
