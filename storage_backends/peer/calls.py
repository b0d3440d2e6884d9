"""Splits one backend call into requests to single ranks, and sends the requests concurrently."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from ...errors import LockstepError
from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_name import ObjectName, name_digest
from ...page_format.object_shape import ObjectShape
from ..base import Read, ReadOutcome
from ..buffers import fitting
from .group import Address, PeerGroup
from .requests import LookupQuestion, PartsRead, PeerRequest, WantedParts
from .wire import NAMES_MAX

RequestT = TypeVar("RequestT", bound=PeerRequest)

_REQUEST_BYTES: Final = 8 << 20
"""Maximum bytes of the objects in one read request. A larger object gets a request of its own."""


async def look_up(group: PeerGroup, names: Sequence[ObjectName], deadline: float) -> list[bool]:
    """Return for each name whether its rank has the object now; False if the rank does not answer."""
    there = [False] * len(names)
    try:
        await group.enter_again(deadline)
    except (OSError, LockstepError):
        return there
    sheets: dict[tuple[Address, str, str], list[int]] = {}
    for at, name in enumerate(names):
        digest = name_digest(name)
        rank = None if digest is None else group.rank_of(name, digest)
        if rank is not None:
            sheets.setdefault((rank, name.pool, name.shard), []).append(at)
    requests: list[tuple[LookupQuestion, list[int]]] = []
    by_rank: dict[Address, list[LookupQuestion]] = {}
    for (rank, pool, shard), positions in sheets.items():
        for first in range(0, len(positions), NAMES_MAX):
            some = positions[first : first + NAMES_MAX]
            question = LookupQuestion(pool, shard, [names[at].key for at in some])
            requests.append((question, some))
            by_rank.setdefault(rank, []).append(question)
    await _ask_ranks(group, by_rank, deadline)
    for question, positions in requests:
        for at, answer in zip(positions, question.there, strict=True):
            there[at] = answer
    return there


async def read_objects(
    group: PeerGroup, reads: Sequence[Read], deadline: float
) -> list[ReadOutcome]:
    """Read the objects into their buffers, which are not touched after the return."""
    outcomes = [ReadOutcome.FAILED] * len(reads)
    digests = [name_digest(read.name) for read in reads]
    late = time.monotonic() >= deadline
    try:
        if not late:
            await group.enter_again(deadline)
    except TimeoutError:
        late = True
    except (OSError, LockstepError):
        return outcomes
    sheets: dict[tuple[Address, str, str, int], list[tuple[int, WantedParts]]] = {}
    shapes: dict[int, ObjectShape] = {}
    for at, (read, digest) in enumerate(zip(reads, digests, strict=True)):
        if digest is None:
            continue
        if late:
            outcomes[at] = ReadOutcome.TIMED_OUT
            continue
        name, shape = read.name, read.shape
        buffers = fitting(read.buffers, shape.nbytes, writable=True)
        if buffers is None:
            continue
        outcomes[at] = ReadOutcome.MISSING
        rank = group.rank_of(name, digest)
        if rank is not None:
            # Group reads by the identity of the shape, not by its value: comparing shapes is slow, and
            # all reads of a batch share one shape object.
            shapes[id(shape)] = shape
            wanted = WantedParts(name.key, digest, buffers)
            sheets.setdefault((rank, name.pool, name.shard, id(shape)), []).append((at, wanted))
    requests: list[tuple[PartsRead, list[int]]] = []
    by_rank: dict[Address, list[PartsRead]] = {}
    for (rank, pool, shard, shape_id), items in sheets.items():
        shape = shapes[shape_id]
        step = max(1, min(NAMES_MAX, _REQUEST_BYTES // (shape.nbytes + HEADER_BYTES)))
        for first in range(0, len(items), step):
            some = items[first : first + step]
            reading = PartsRead(pool, shard, shape, [wanted for _, wanted in some])
            requests.append((reading, [at for at, _ in some]))
            by_rank.setdefault(rank, []).append(reading)
    await _ask_ranks(group, by_rank, deadline)
    for reading, positions in requests:
        for at, outcome in zip(positions, reading.outcomes, strict=True):
            outcomes[at] = reading.unanswered if outcome is None else outcome
    return outcomes


async def _ask_ranks(
    group: PeerGroup, by_rank: Mapping[Address, Sequence[RequestT]], deadline: float
) -> None:
    """Send the requests; return when each is answered or failed, or the deadline has passed.

    No buffer is touched after the return or a cancellation.
    """
    calls = [_ask_rank(group, rank, requests, deadline) for rank, requests in by_rank.items()]
    if len(calls) == 1:
        await calls[0]
    elif calls:
        # Use `gather`: it passes a cancellation on to all calls, and returns only when all calls have
        # ended.
        await asyncio.gather(*calls)


async def _ask_rank(
    group: PeerGroup, rank: Address, requests: Sequence[RequestT], deadline: float
) -> None:
    try:
        connection = await group.connection(rank, deadline)
    except TimeoutError:
        for request in requests:
            request.unanswered = ReadOutcome.TIMED_OUT
        return
    except (OSError, LockstepError):
        return
    try:
        for request in requests:
            connection.submit(request)
        left_s = max(0.0, deadline - time.monotonic())
        await asyncio.wait([request.done for request in requests], timeout=left_s)
    finally:
        for request in requests:
            if not request.done.done():
                request.unanswered = ReadOutcome.TIMED_OUT
                connection.abandon(request)
