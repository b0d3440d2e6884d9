"""Bytes that go between memory and objects of a Mooncake Store, and how many are asked for at once.

The library moves the pieces of a call one after the other, and waits for the owner of each (30 seconds
over TCP, unless its environment says otherwise). So of an owner that has stopped, a call with many
pieces would be held for as many times as long, whatever its deadline. A call of the library costs
some 0.1 ms, on the other hand. Therefore pieces are moved in steps: the first is one piece, which
tells whether the owner answers, and later ones are as large as a call is worth.

A reader has a lease on an object, after which the master may give the memory to another one. What
arrived later is refused by the library, which then forgets where the object lies. On a busy machine
that happens to healthy reads, so such a step is repeated under a new lease; those before it count.
"""

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from ..threaded_backend import Stop

STEP_PIECES: Final = 8
STEP_BYTES: Final = 256 << 10
"""A step gets no further piece once it has so many bytes: their price is then far above a call's."""
LEASES: Final = 3
"""How many further leases one step gets, where each runs out."""
_PROMPT_S: Final = 0.5
"""A step that took longer is followed by steps of one piece, until one is prompt again."""


class Code(IntEnum):
    """What the library answers for a key, where that is not success; others are failures."""

    NO_ROOM = -200
    INVALID = -600
    """Also: a range goes beyond the object's end, there is no session, the owner cannot be reached."""
    NOT_IN_MEMORY = -702
    NOT_READY = -703
    """Somebody is writing it."""
    NOT_FOUND = -704
    EXISTS = -705
    """Also while it is being written."""
    LEASE_EXPIRED = -707
    NOT_TRANSFERRED = -800
    NO_MASTER = -900
    MASTER_LATE = -901
    """Also, from here: it was not begun in time."""


class Piece(NamedTuple):
    """Bytes in memory that was registered, and where they belong in an object."""

    address: int
    nbytes: int
    offset: int


Columns = list[list[int]]
Move = Callable[[list[str], Columns, Columns, Columns], list[int]]
"""The library's: addresses, lengths and offsets of each key's pieces; gives a code for each key."""


def move(by: Move, keys: Sequence[str], pieces: Sequence[Sequence[Piece]], stop: Stop) -> list[int]:
    """Move pieces of objects; the codes are how many bytes of each were moved, or negative.

    After a piece that failed, those after it of the same object are left out. What was not begun
    when `stop` is due is late.
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
        step: dict[int, list[Piece]] = {}
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
    """Return `by`, for reads, so that what comes too late for its lease is read under another.

    `renew` asks the master where objects lie, and gives a code for each. `dropped` says whether
    another reader of this client may have lost the lease that they share, which leaves INVALID for
    this one. What could not be repeated before `stop` was due is late.
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
    """Return the codes; where the library gave no list of them, that it failed."""
    return codes if len(codes) == len(keys) else [int(Code.NO_MASTER)] * len(keys)


def _lost(code: int, key: str, dropped: Callable[[str], bool]) -> bool:
    return code == Code.LEASE_EXPIRED or (code == Code.INVALID and dropped(key))


def _end_of_step(waiting: Sequence[tuple[int, Piece]], start: int) -> int:
    end, nbytes = start, 0
    while end < min(start + STEP_PIECES, len(waiting)) and nbytes < STEP_BYTES:
        nbytes += waiting[end][1].nbytes
        end += 1
    return end


def _columns(pieces: Sequence[Sequence[Piece]]) -> tuple[Columns, Columns, Columns]:
    return (
        [[piece.address for piece in each] for each in pieces],
        [[piece.nbytes for piece in each] for each in pieces],
        [[piece.offset for piece in each] for each in pieces],
    )
