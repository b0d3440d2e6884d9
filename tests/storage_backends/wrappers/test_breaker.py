"""`breaker+`: when it opens, its answers while open, and how it detects that the store is back."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import Read, ReadOutcome, Write, WriteOutcome
from lockstep.storage_backends.wrappers.breaker import BreakerBackend, BreakerState
from tests.kit.storage.calls import now, object_name
from tests.kit.storage.layers import (
    PAGE_BYTES,
    Failing,
    Watched,
    a_read,
    a_while,
    a_write,
    memory_store,
    reads_of,
    run_virtually,
    writes_of,
)

pytestmark = pytest.mark.virtual_time

ONE = [object_name(1)]
FAILED = [ReadOutcome.FAILED]
OK = [ReadOutcome.OK]


class Store:
    """A one-page store that can be made to fail; its breaker opens for 10 s after 3 failed calls."""

    def __init__(self, failing: Failing) -> None:
        self.failing = failing
        self.watched = Watched(failing)
        self.backend = BreakerBackend(self.watched, calls=3, cool_down_s=10.0, clock=now)

    def state(self) -> BreakerState:
        return self.backend.state()

    @property
    def call_count(self) -> int:
        return len(self.watched.calls)

    async def read(self, number: int = 1) -> list[ReadOutcome]:
        return await self.backend.read(reads_of(number), deadline=a_while())

    async def fail(self, times: int = 3) -> None:
        self.failing.down = True
        for _ in range(times):
            assert await self.read() == FAILED


async def a_store() -> Store:
    return Store(Failing(await memory_store([1])))


async def test_after_enough_failed_calls_in_a_row_all_calls_are_answered_without_the_store() -> (
    None
):
    store = await a_store()
    await store.fail(2)
    assert store.state() is BreakerState.CLOSED
    await store.fail(1)
    assert store.state() is BreakerState.OPEN
    store.failing.down = False
    assert await store.read() == FAILED
    assert await store.backend.write(writes_of(2), deadline=a_while()) == [WriteOutcome.FAILED]
    assert await store.backend.exists(ONE, deadline=a_while()) == [False]
    assert await store.backend.remove(ONE, deadline=a_while()) == [False]
    assert store.call_count == 3


async def test_one_answer_in_between_and_the_count_starts_again() -> None:
    store = await a_store()
    answers: list[ReadOutcome] = []
    for _ in range(4):
        await store.fail(2)
        store.failing.down = False
        answers += await store.read(7)

    assert answers == [ReadOutcome.MISSING] * 4
    assert store.state() is BreakerState.CLOSED


async def test_a_call_fails_only_if_all_of_its_keys_do() -> None:
    store = await a_store()
    store.failing.left[object_name(1)] = 9

    outcomes = [await store.backend.read(reads_of(1, 2), deadline=a_while()) for _ in range(9)]

    assert outcomes == [[ReadOutcome.FAILED, ReadOutcome.MISSING]] * 9
    assert store.state() is BreakerState.CLOSED


IMPOSSIBLE = ObjectName("../x", "k", "p", "s")
TOO_LONG = (memoryview(bytearray(9999)),)
READ_ONLY = (memoryview(bytes(PAGE_BYTES)),)


@pytest.mark.parametrize(
    ("read", "write"),
    [
        (a_read(1)._replace(name=IMPOSSIBLE), a_write(2)._replace(name=IMPOSSIBLE)),
        (a_read(1)._replace(buffers=TOO_LONG), a_write(2)._replace(buffers=TOO_LONG)),
        (a_read(1)._replace(buffers=READ_ONLY), a_write(2)._replace(buffers=TOO_LONG)),
    ],
    ids=["impossible name", "longer buffer", "read-only buffer"],
)
async def test_a_call_whose_keys_all_fail_by_the_caller_s_own_fault_says_nothing(
    read: Read, write: Write
) -> None:
    store = await a_store()
    # Requests that the store refuses before any I/O, because they are invalid, do not open the breaker.
    store.failing.down = True
    own_fault = [
        (
            await store.backend.read([read], deadline=a_while()),
            await store.backend.write([write], deadline=a_while()),
            await store.backend.remove([IMPOSSIBLE], deadline=a_while()),
        )
        for _ in range(5)
    ]
    assert own_fault == [(FAILED, [WriteOutcome.FAILED], [False])] * 5
    assert store.state() is BreakerState.CLOSED
    # Each call has an invalid key and a valid one. A failure of the valid key counts, so three calls
    # open the breaker.
    both = [await store.backend.read([read, *reads_of(1)], deadline=a_while()) for _ in range(3)]
    assert both == [FAILED * 2] * 3
    assert store.state() is BreakerState.OPEN


async def test_calls_that_time_out_open_the_breaker_and_calls_that_came_too_late_do_not() -> None:
    store = await a_store()
    late = [
        (
            await store.backend.read(reads_of(1), deadline=now()),
            await store.backend.read([], deadline=a_while()),
        )
        for _ in range(9)
    ]
    assert late == [([ReadOutcome.TIMED_OUT], [])] * 9
    assert store.state() is BreakerState.CLOSED
    store.watched.before = lambda: asyncio.sleep(5.0)
    too_slow = [await store.backend.read(reads_of(1), deadline=now() + 5.0) for _ in range(2)]
    assert too_slow == [[ReadOutcome.TIMED_OUT]] * 2
    assert await store.backend.exists(ONE, deadline=now() + 5.0) == [False]
    assert store.state() is BreakerState.OPEN


async def test_existence_that_is_answered_in_time_says_nothing_about_the_store() -> None:
    store = await a_store()
    await store.fail(2)
    store.failing.down = False
    assert await store.backend.exists(ONE, deadline=a_while()) == [True]
    await store.fail(1)
    assert store.state() is BreakerState.OPEN


async def test_after_the_cool_down_one_call_at_a_time_is_let_through_until_the_store_answers() -> (
    None
):
    store = await a_store()
    await store.fail()
    store.failing.down = False
    await asyncio.sleep(10.0)
    assert store.state() is BreakerState.HALF_OPEN
    gate = asyncio.Event()
    store.watched.before = gate.wait
    trial = asyncio.create_task(store.read())
    await asyncio.sleep(0)
    assert await store.read() == FAILED
    gate.set()
    assert await trial == OK
    assert store.state() is BreakerState.CLOSED
    assert await store.read() == OK
    assert store.call_count == 5


async def test_a_trial_that_fails_keeps_the_breaker_open_for_another_cool_down() -> None:
    store = await a_store()
    await store.fail()
    await asyncio.sleep(10.0)
    assert await store.read() == FAILED
    assert (store.call_count, store.state()) == (4, BreakerState.OPEN)
    store.failing.down = False
    await asyncio.sleep(9.0)
    assert await store.read() == FAILED
    assert store.call_count == 4
    await asyncio.sleep(1.0)
    assert await store.read() == OK
    assert store.state() is BreakerState.CLOSED


async def test_existence_gets_through_after_the_cool_down_so_that_a_reader_comes_to_read() -> None:
    store = await a_store()
    await store.fail()
    store.failing.down = False
    await asyncio.sleep(10.0)
    assert await store.backend.exists(ONE, deadline=a_while()) == [True]
    assert store.state() is BreakerState.HALF_OPEN
    assert await store.read() == OK
    assert store.state() is BreakerState.CLOSED


async def test_a_trial_that_is_cancelled_leaves_it_to_the_next_call() -> None:
    store = await a_store()
    await store.fail()
    store.failing.down = False
    await asyncio.sleep(10.0)
    store.watched.before = asyncio.Event().wait
    trial = asyncio.create_task(store.read())
    await asyncio.sleep(0)
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    store.watched.before = None
    assert await store.read() == OK
    assert store.state() is BreakerState.CLOSED


async def test_a_call_that_began_before_the_breaker_opened_does_not_close_it() -> None:
    store = await a_store()
    gate = asyncio.Event()
    store.watched.before = gate.wait
    early = asyncio.create_task(store.read())
    await asyncio.sleep(0)
    store.watched.before = None
    await store.fail()
    store.failing.down = False
    gate.set()
    assert await early == OK
    assert store.state() is BreakerState.OPEN


@given(st.lists(st.floats(0.0, 30.0), max_size=60))
def test_a_store_that_is_gone_is_asked_once_in_a_cool_down_at_most(waits: list[float]) -> None:
    async def scenario() -> None:
        store = await a_store()
        store.failing.down = True
        for wait_s in waits:
            await asyncio.sleep(wait_s)
            await store.read()
        trials = store.watched.times[2:]
        assert all(two - one >= 10.0 for one, two in pairwise(trials))

    run_virtually(scenario())
