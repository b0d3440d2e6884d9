"""`limit+`: never more than the bounds in flight, in order, and nothing lost on the way."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.wrappers.limit import InFlight, LimitBackend
from tests.kit.storage.calls import now, object_name
from tests.kit.storage.layers import (
    PAGE_BYTES,
    Watched,
    a_read,
    a_while,
    memory_store,
    reads_of,
    run_virtually,
    writes_of,
)

pytestmark = pytest.mark.virtual_time

QUIET = InFlight(calls=0, nbytes=0, waiting=0, turned_away=0)


@dataclass
class Slow:
    """A store whose every call takes `call_s`, behind a limit; it watches what is in flight."""

    watched: Watched
    backend: LimitBackend
    call_s: float = 1.0
    seen: list[InFlight] = field(default_factory=list[InFlight])

    async def work(self) -> None:
        self.seen.append(self.backend.in_flight())
        await asyncio.sleep(self.call_s)


async def a_store(calls: int = 64, nbytes: int = 1 << 30) -> Slow:
    watched = Watched(await memory_store(range(8)))
    slow = Slow(watched, LimitBackend(watched, calls=calls, nbytes=nbytes, clock=now))
    watched.before = slow.work
    return slow


async def test_no_more_calls_than_allowed_are_in_flight_and_all_get_their_turn_in_order() -> None:
    slow = await a_store(calls=2)
    begun = now()
    calls = [slow.backend.read(reads_of(number), deadline=a_while()) for number in range(7)]
    assert await asyncio.gather(*calls) == [[ReadOutcome.OK]] * 7
    assert [int(names[0].key, 16) for names in slow.watched.asked] == list(range(7))
    assert max(seen.calls for seen in slow.seen) == 2
    assert now() - begun == pytest.approx(4.0)
    assert slow.backend.in_flight() == QUIET


async def test_no_more_bytes_than_allowed_are_in_flight_and_a_larger_call_goes_alone() -> None:
    slow = await a_store(nbytes=3 * PAGE_BYTES)
    sizes = [2, 1, 5, 1, 1]
    calls = [slow.backend.read(reads_of(*range(size)), deadline=a_while()) for size in sizes]
    await asyncio.gather(*calls)
    assert [len(names) for names in slow.watched.asked] == sizes
    in_flight = [(seen.calls, seen.nbytes // PAGE_BYTES) for seen in slow.seen]
    assert in_flight == [(1, 2), (2, 3), (1, 3), (2, 2), (2, 2)]


async def test_all_kinds_of_calls_count() -> None:
    slow = await a_store(calls=1)
    names = [object_name(1)]
    calls = (
        slow.backend.write(writes_of(1), deadline=a_while()),
        slow.backend.exists(names, deadline=a_while()),
        slow.backend.remove(names, deadline=a_while()),
        slow.backend.read(reads_of(1), deadline=a_while()),
    )
    answers: list[object] = [*await asyncio.gather(*calls)]
    assert answers == [[WriteOutcome.PRESENT], [True], [True], [ReadOutcome.MISSING]]
    assert [seen.calls for seen in slow.seen] == [1, 1, 1, 1]


async def test_a_call_whose_deadline_comes_while_it_waits_is_timed_out_and_asks_for_nothing() -> (
    None
):
    slow = await a_store(calls=1)
    begun = now()
    first = asyncio.create_task(slow.backend.read(reads_of(0), deadline=a_while()))
    await asyncio.sleep(0)
    soon, names = begun + 0.5, [object_name(1)] * 2
    calls = (
        slow.backend.read(reads_of(1, 2), deadline=soon),
        slow.backend.write(writes_of(1), deadline=soon),
        slow.backend.exists(names, deadline=soon),
        slow.backend.remove(names, deadline=soon),
    )
    answers: list[object] = [*await asyncio.gather(*calls)]
    assert answers == [
        [ReadOutcome.TIMED_OUT] * 2,
        [WriteOutcome.TIMED_OUT],
        [False, False],
        [False, False],
    ]
    assert now() == pytest.approx(soon)
    assert await first == [ReadOutcome.OK]
    assert len(slow.watched.asked) == 1
    assert slow.backend.in_flight() == InFlight(calls=0, nbytes=0, waiting=0, turned_away=4)


async def test_a_call_that_is_cancelled_while_it_waits_touches_nothing_and_holds_up_nobody() -> (
    None
):
    slow = await a_store(calls=2, nbytes=2 * PAGE_BYTES)
    read, many = a_read(1), reads_of(2, 3, 4)
    first = asyncio.create_task(slow.backend.read(reads_of(0), deadline=a_while()))
    large = asyncio.create_task(slow.backend.read([read, *many], deadline=a_while()))
    behind = asyncio.create_task(slow.backend.read(reads_of(5), deadline=a_while()))
    await asyncio.sleep(0.5)
    assert slow.backend.in_flight().waiting == 2
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await asyncio.sleep(0)
    assert slow.backend.in_flight().calls == 2
    assert [await first, await behind] == [[ReadOutcome.OK]] * 2
    assert bytes(read.buffers[0]) == bytes(PAGE_BYTES)
    assert slow.backend.in_flight() == QUIET


async def test_a_call_that_is_cancelled_in_the_moment_of_its_turn_gives_its_room_back() -> None:
    slow = await a_store(calls=1)
    first = asyncio.create_task(slow.backend.read(reads_of(0), deadline=a_while()))
    second = asyncio.create_task(slow.backend.read(reads_of(1), deadline=a_while()))
    third = asyncio.create_task(slow.backend.read(reads_of(2), deadline=a_while()))
    first.add_done_callback(lambda _: second.cancel())
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await third == [ReadOutcome.OK]
    assert slow.backend.in_flight() == QUIET


@dataclass(frozen=True)
class Step:
    """One call: when it comes, how many pages it reads, and when its caller gives it up."""

    wait_s: float
    pages: int
    deadline_s: float
    cancel_after_s: float | None


STEPS = st.lists(
    st.builds(
        Step,
        wait_s=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        pages=st.integers(0, 6),
        deadline_s=st.sampled_from([0.0, 0.5, 1.0, 2.0, 100.0]),
        cancel_after_s=st.sampled_from([None, None, 0.0, 0.5, 1.0, 2.0]),
    ),
    max_size=20,
)


@given(steps=STEPS, calls=st.integers(1, 3), pages=st.integers(1, 4))
def test_whatever_comes_the_bounds_hold_and_all_room_comes_back(
    steps: list[Step], calls: int, pages: int
) -> None:
    async def one(slow: Slow, step: Step) -> None:
        reads = reads_of(*range(step.pages))
        with suppress(TimeoutError):
            async with asyncio.timeout(step.cancel_after_s):
                outcomes = await slow.backend.read(reads, deadline=now() + step.deadline_s)
                assert len(outcomes) == step.pages
                assert set(outcomes) <= {ReadOutcome.OK, ReadOutcome.TIMED_OUT}

    async def scenario() -> None:
        slow = await a_store(calls=calls, nbytes=pages * PAGE_BYTES)
        async with asyncio.TaskGroup() as group:
            for step in steps:
                await asyncio.sleep(step.wait_s)
                group.create_task(one(slow, step))
        assert all(seen.calls <= calls for seen in slow.seen)
        assert all(seen.nbytes <= pages * PAGE_BYTES for seen in slow.seen)
        left = slow.backend.in_flight()
        assert (left.calls, left.nbytes, left.waiting) == (0, 0, 0)

    run_virtually(scenario())
