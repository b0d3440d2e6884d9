"""Moves bytes between memory and objects of a Mooncake Store in steps of bounded size.

A step is one call of the library with some pieces (ranges of bytes). The library moves the pieces of a
call one after the other. For each piece it waits for the process that owns the memory, by default up to
30 seconds over TCP. If an owner has stopped, a call with many pieces would block for a multiple of 30
seconds, past its deadline. But each call costs some 0.1 ms. Therefore the first step is one piece,
which shows whether the owner answers, and later steps are large enough to be worth a call.

A reader has a lease on an object, after which the master may reuse the memory. If bytes arrive after
the lease has expired, the library rejects them and forgets where the object is. On a busy machine that
happens to valid reads, so the rejected step is repeated under a new lease. The finished steps are not
repeated.
"""

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from ..threaded_backend import Stop

STEP_PIECES: Final = 8
STEP_BYTES: Final = 256 << 10
"""Pieces are added to a step until it has this number of bytes. Moving so many bytes takes far longer
than the overhead of a call, so larger steps would save little."""
LEASES: Final = 3
"""Maximum number of times that one step is repeated under a new lease."""
_PROMPT_S: Final = 0.5
"""Maximum seconds of a fast step. After a slow step, each step has only one piece until a step is fast
again."""


class Code(IntEnum):
    """The library's negative return codes that this backend distinguishes; there are others."""

    NO_ROOM = -200
    INVALID = -600
    """Invalid request. Also returned for a range beyond the object's end, a missing session, or an
    unreachable owner."""
    NOT_IN_MEMORY = -702
    NOT_READY = -703
    """Another writer is still writing the object."""
    NOT_FOUND = -704
    EXISTS = -705
    """The object exists, or another writer is still writing it."""
    LEASE_EXPIRED = -707
    NOT_TRANSFERRED = -800
    NO_MASTER = -900
    MASTER_LATE = -901
    """The master did not answer in time. This backend also uses the code for a transfer that was not
    started in time."""


class BufferPiece(NamedTuple):
    """A range of bytes in registered memory, and its offset in an object."""

    address: int
    nbytes: int
    offset: int


Columns = list[list[int]]
Move = Callable[[list[str], Columns, Columns, Columns], list[int]]
"""A call of the library that takes the addresses, lengths and offsets of the pieces of each key, and
returns one return code per key."""


def move(
    by: Move, keys: Sequence[str], pieces: Sequence[Sequence[BufferPiece]], stop: Stop
) -> list[int]:
    """Move pieces of objects; return per key the number of bytes moved, or a negative error code.

    After a failed piece, later pieces of the same object are skipped. Pieces that were not started when
    `stop` became due get the code MASTER_LATE.
    """
    codes = [0] * len(keys)
    waiting = [(at, piece) for at, each in enumerate(pieces) for piece in each]
    start, prompt = 0, False
    while start < len(waiting):
        if stop.due():
            for at, _ in waiting[start:]:
                codes[at] = codes[at] if codes[at] < 0 else Code.MASTER_LATE
            break
        end = _end_of_step(waiting, start) if prompt else start + 1
        step: dict[int, list[BufferPiece]] = {}
        for at, piece in waiting[start:end]:
            if codes[at] >= 0:
                step.setdefault(at, []).append(piece)
        start = end
        if step:
            began = time.monotonic()
            some = [keys[at] for at in step]
            answer = complete(by(some, *_columns(list(step.values()))), some)
            prompt = time.monotonic() - began < _PROMPT_S
            for at, code in zip(step, answer, strict=True):
                codes[at] = code if code < 0 else codes[at] + code
    return codes


def renewing(
    by: Move,
    renew: Callable[[list[str]], list[int]],
    dropped: Callable[[str], bool],
    stop: Stop,
) -> Move:
    """Return a function that reads with `by`, and repeats a read under a new lease if necessary.

    A read is repeated if its bytes arrived after its lease had expired. All readers of a key in this
    process share one session. So a read with the code INVALID is repeated too, if `dropped` says that
    another reader may have ended the session. `renew` queries the locations of objects from the master,
    and returns a code for each. If `stop` is due before a repetition, the read gets MASTER_LATE.
    """

    def read(keys: list[str], addresses: Columns, lengths: Columns, offsets: Columns) -> list[int]:
        codes = complete(by(keys, addresses, lengths, offsets), keys)
        for _ in range(LEASES):
            lost = [at for at, code in enumerate(codes) if _lost(code, keys[at], dropped)]
            if not lost:
                break
            if stop.due():
                for at in lost:
                    codes[at] = Code.MASTER_LATE
                break
            for at, code in zip(lost, renew([keys[at] for at in lost]), strict=True):
                codes[at] = code
            again = [at for at in lost if not codes[at]]
            if again:
                some = [keys[at] for at in again]
                columns = [[each[at] for at in again] for each in (addresses, lengths, offsets)]
                for at, code in zip(again, complete(by(some, *columns), some), strict=True):
                    codes[at] = code
        return codes

    return read


def complete(codes: list[int], keys: Sequence[str]) -> list[int]:
    """Return `codes` if the library gave one for each key; otherwise NO_MASTER for each key."""
    return codes if len(codes) == len(keys) else [int(Code.NO_MASTER)] * len(keys)


def _lost(code: int, key: str, dropped: Callable[[str], bool]) -> bool:
    return code == Code.LEASE_EXPIRED or (code == Code.INVALID and dropped(key))


def _end_of_step(waiting: Sequence[tuple[int, BufferPiece]], start: int) -> int:
    end, nbytes = start, 0
    while end < min(start + STEP_PIECES, len(waiting)) and nbytes < STEP_BYTES:
        nbytes += waiting[end][1].nbytes
        end += 1
    return end


def _columns(pieces: Sequence[Sequence[BufferPiece]]) -> tuple[Columns, Columns, Columns]:
    return (
        [[piece.address for piece in each] for each in pieces],
        [[piece.nbytes for piece in each] for each in pieces],
        [[piece.offset for piece in each] for each in pieces],
    )
