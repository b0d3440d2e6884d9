"""`retry+`: what is tried again, how often, and that no deadline is missed for it."""

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage_backends.base import Read, ReadOutcome, WriteOutcome
from lockstep.storage_backends.damage.damage import DamageKind
from lockstep.storage_backends.wrappers.retry import Retried, RetryBackend, RetryPolicy
from tests.kit.storage.calls import EVERY, columns, now, object_name, put_columns
from tests.kit.storage.damaging import damaged
from tests.kit.storage.layers import (
    Failing,
    Watched,
    a_read,
    a_while,
    a_write,
    memory_store,
    reads_of,
    writes_of,
)

pytestmark = pytest.mark.virtual_time

POLICY = RetryPolicy(attempts=4, base_s=1.0, cap_s=100.0)


def retrying(watched: Watched, policy: RetryPolicy = POLICY) -> RetryBackend:
    return RetryBackend(watched, policy, random=Random(1), clock=now)


async def test_a_key_that_failed_is_tried_again_until_it_is_answered() -> None:
    watched = Watched(Failing(await memory_store([1, 2]), {2: 2, 3: 1}))
    backend = retrying(watched)
    reads = reads_of(1, 2)
    assert await backend.read(reads, deadline=a_while()) == [ReadOutcome.OK] * 2
    assert await backend.write(writes_of(3, 1), deadline=a_while()) == [
        WriteOutcome.OK,
        WriteOutcome.PRESENT,
    ]
    one, two, three = object_name(1), object_name(2), object_name(3)
    assert watched.asked == [[one, two], [two], [two], [three, one], [three]]
    assert bytes(reads[1].buffers[0]) == bytes(a_write(2).buffers[0])
    assert backend.retried() == Retried(tries=3, recovered=2, given_up=0)


async def test_a_key_that_has_its_answer_is_not_asked_for_again() -> None:
    store = await memory_store([1, 2])
    await put_columns(store, object_name(3), 0)
    assert await damaged(store, DamageKind.SHORT, 2)
    watched = Watched(store)
    backend = retrying(watched)
    full = columns(EVERY)
    lacking = Read(object_name(3), (memoryview(bytearray(full.nbytes)),), full)
    assert await backend.read([*reads_of(1, 2, 9), lacking], deadline=a_while()) == [
        ReadOutcome.OK,
        ReadOutcome.CORRUPT,
        ReadOutcome.MISSING,
        ReadOutcome.LACKING,
    ]
    assert await backend.read(reads_of(1), deadline=now()) == [ReadOutcome.TIMED_OUT]
    assert len(watched.asked) == 2


async def test_existence_and_removal_are_asked_once() -> None:
    watched = Watched(Failing(await memory_store([1]), {1: 2}))
    backend = retrying(watched)
    assert await backend.exists([object_name(1)], deadline=a_while()) == [False]
    assert await backend.remove([object_name(1)], deadline=a_while()) == [False]
    assert len(watched.asked) == 2


async def test_a_key_is_given_up_after_so_many_tries() -> None:
    watched = Watched(Failing(await memory_store(), {1: 99}))
    backend = retrying(watched)
    assert await backend.write(writes_of(1), deadline=a_while()) == [WriteOutcome.FAILED]
    assert len(watched.asked) == POLICY.attempts
    assert backend.retried() == Retried(tries=3, recovered=0, given_up=1)


async def test_a_pause_that_would_outlast_the_deadline_is_not_made() -> None:
    begun = now()
    watched = Watched(Failing(await memory_store([1]), {1: 99}))
    backend = retrying(watched, RetryPolicy(attempts=20, base_s=1.0, cap_s=1.0))
    outcomes = await backend.read(reads_of(1), deadline=begun + 5.0)
    assert outcomes == [ReadOutcome.FAILED]
    assert begun + 3.0 < now() < begun + 5.0
    assert 5 <= len(watched.asked) <= 10


async def test_a_write_that_fails_and_then_times_out_may_have_been_stored_and_says_so() -> None:
    watched = Watched(Failing(await memory_store(), {1: 1}))
    watched.before = lambda: asyncio.sleep(10.0)
    backend = retrying(watched)
    outcomes = await backend.write(writes_of(1), deadline=now() + 20.0)
    assert outcomes == [WriteOutcome.TIMED_OUT]
    assert backend.retried() == Retried(tries=1, recovered=0, given_up=0)


async def test_a_call_that_is_cancelled_in_a_pause_returns_at_once_and_asks_for_nothing_more() -> (
    None
):
    watched = Watched(Failing(await memory_store([1]), {1: 1}))
    backend = retrying(watched)
    read = a_read(1)
    call = asyncio.create_task(backend.read([read], deadline=a_while()))
    await asyncio.sleep(0.25)
    cancelled_at = now()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert now() == cancelled_at
    await asyncio.sleep(100.0)
    assert len(watched.asked) == 1
    assert bytes(read.buffers[0]) == bytes(read.shape.nbytes)


async def test_a_store_that_is_closed_in_a_pause_is_not_asked_again() -> None:
    watched = Watched(Failing(await memory_store([1]), {1: 1}))
    backend = retrying(watched)
    call = asyncio.create_task(backend.read(reads_of(1), deadline=a_while()))
    await asyncio.sleep(0.25)
    await backend.close()
    assert await call == [ReadOutcome.FAILED]
    assert len(watched.asked) == 1


@given(
    tried=st.integers(1, 2000),
    base_s=st.floats(0.001, 60.0),
    cap_s=st.floats(0.001, 600.0),
    seed=st.integers(0, 99),
)
def test_pauses_double_up_to_the_cap_and_are_scattered_over_half_of_their_length(
    tried: int, base_s: float, cap_s: float, seed: int
) -> None:
    policy = RetryPolicy(attempts=20, base_s=base_s, cap_s=cap_s)
    due = min(cap_s, base_s * 2 ** min(tried - 1, 64))
    assert due / 2 <= policy.pause_s(tried, Random(seed)) <= due
    assert policy.pause_s(tried, Random(seed)) == policy.pause_s(tried, Random(seed))
