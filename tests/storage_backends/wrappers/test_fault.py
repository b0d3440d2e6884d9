"""`fault+`: each fault does what its name says, is repeatable, and is counted."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.wrappers.fault import Fault, FaultBackend, FaultPlan
from tests.kit.storage.calls import now, object_name, run
from tests.kit.storage.layers import (
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


async def a_store(rates: Mapping[Fault, float], seed: int = 0) -> tuple[Watched, FaultBackend]:
    watched = Watched(await memory_store(range(4)))
    plan = FaultPlan(seed=seed, rates=rates, delay_s=8.0)
    return watched, FaultBackend(watched, plan, clock=now)


async def test_a_plan_without_rates_changes_nothing() -> None:
    _, backend = await a_store({})
    assert await backend.read(reads_of(0, 9), deadline=a_while()) == [
        ReadOutcome.OK,
        ReadOutcome.MISSING,
    ]
    assert backend.injected.total() == 0


async def test_an_error_fails_a_key_and_the_store_is_not_asked_for_it() -> None:
    watched, backend = await a_store({Fault.ERROR: 1.0})
    assert await backend.read(reads_of(0, 1), deadline=a_while()) == [ReadOutcome.FAILED] * 2
    assert await backend.write(writes_of(7), deadline=a_while()) == [WriteOutcome.FAILED]
    assert await backend.exists([object_name(0)], deadline=a_while()) == [False]
    assert await backend.remove([object_name(0)], deadline=a_while()) == [False]
    assert [len(names) for names in watched.calls] == [0, 0, 1, 0]
    assert backend.injected == {Fault.ERROR: 5}
    assert await watched.read(reads_of(0), deadline=a_while()) == [ReadOutcome.OK]


async def test_a_timeout_has_no_answer_before_the_deadline_and_its_write_may_be_there() -> None:
    watched, backend = await a_store({Fault.TIMEOUT: 1.0})
    begun = now()
    reads = reads_of(0)
    assert await backend.read(reads, deadline=begun + 5.0) == [ReadOutcome.TIMED_OUT]
    assert now() == begun + 5.0
    assert not any(reads[0].buffers[0])
    writes = writes_of(*range(100, 140))
    outcomes = await backend.write(writes, deadline=begun + 9.0)
    assert outcomes == [WriteOutcome.TIMED_OUT] * 40
    assert now() == begun + 9.0
    names = [write.name for write in writes]
    assert 10 < sum(await watched.exists(names, deadline=a_while())) < 30
    assert backend.injected == {Fault.TIMEOUT: 41}


async def test_a_delay_is_no_longer_than_said_and_never_goes_past_the_deadline() -> None:
    _, backend = await a_store({Fault.DELAY: 1.0})
    outcomes: list[ReadOutcome] = []
    times = [now()]
    for _ in range(50):
        outcomes += await backend.read(reads_of(0), deadline=a_while())
        times.append(now())
    assert outcomes == [ReadOutcome.OK] * 50
    delays = [after - before for before, after in pairwise(times)]
    assert 0 < min(delays) < 2
    assert 6 < max(delays) <= 8.0
    begun = now()
    for _ in range(50):
        await backend.write(writes_of(0), deadline=now() + 0.5)
    assert now() - begun <= 25.0
    assert backend.injected == {Fault.DELAY: 100}


async def test_a_lost_write_is_said_to_be_ok_and_nothing_is_stored() -> None:
    watched, backend = await a_store({Fault.LOST: 1.0})
    assert await backend.write(writes_of(7, 8), deadline=a_while()) == [WriteOutcome.OK] * 2
    assert await watched.read(reads_of(7, 8), deadline=a_while()) == [ReadOutcome.MISSING] * 2
    assert backend.injected == {Fault.LOST: 2}


async def test_a_lie_turns_existence_round() -> None:
    _, backend = await a_store({Fault.LIE: 1.0})
    names = [object_name(0), object_name(9)]
    assert await backend.exists(names, deadline=a_while()) == [False, True]
    assert backend.injected == {Fault.LIE: 2}


async def test_a_flip_is_corrupt_once_and_then_missing_and_can_be_written_again() -> None:
    watched, backend = await a_store({Fault.FLIP: 1.0})
    sound, (read,) = reads_of(1), reads_of(1)
    assert await watched.read(sound, deadline=a_while()) == [ReadOutcome.OK]
    assert await backend.read([read], deadline=a_while()) == [ReadOutcome.CORRUPT]
    assert bytes(read.buffers[0]) != bytes(sound[0].buffers[0])
    assert await backend.read(reads_of(1), deadline=a_while()) == [ReadOutcome.MISSING]
    assert await backend.write(writes_of(1), deadline=a_while()) == [WriteOutcome.OK]
    assert await watched.read(reads_of(0, 1), deadline=a_while()) == [ReadOutcome.OK] * 2
    assert backend.injected == {Fault.FLIP: 1}


async def test_where_there_is_no_object_nothing_is_flipped() -> None:
    _, backend = await a_store({Fault.FLIP: 1.0})
    assert await backend.read(reads_of(99), deadline=a_while()) == [ReadOutcome.MISSING]
    assert backend.injected.total() == 0


async def test_a_call_that_comes_too_late_or_after_the_close_has_no_faults() -> None:
    _, backend = await a_store({Fault.ERROR: 0.5, Fault.LOST: 0.5})
    assert await backend.write(writes_of(7) * 9, deadline=now()) == [WriteOutcome.TIMED_OUT] * 9
    await backend.close()
    assert await backend.write(writes_of(7) * 9, deadline=a_while()) == [WriteOutcome.FAILED] * 9
    assert backend.injected.total() == 0


def test_equal_seeds_inject_the_same_faults_and_other_seeds_other_ones() -> None:
    rates = dict.fromkeys(Fault, 0.1)

    async def outcomes(seed: int) -> list[Any]:
        _, backend = await a_store(rates, seed)
        seen: list[Any] = []
        for number in range(60):
            seen.append(await backend.write([a_write(number % 9)], deadline=now() + 9.0))
            seen.append(await backend.read([a_read(number % 7)], deadline=now() + 9.0))
            seen.append(await backend.exists([object_name(number)], deadline=now() + 9.0))
            seen.append(now())
        return [*seen, backend.injected]

    once, again, other = [run_virtually(outcomes(seed)) for seed in (5, 5, 6)]
    assert once == again
    assert once != other


async def kinds_that_come(backend: StorageBackend) -> set[Fault]:
    """Call a backend often enough that every fault it can inject occurs; return these faults."""
    assert isinstance(backend, FaultBackend)
    await backend.open()
    for number in range(600):
        soon = now() + 0.02
        await backend.write([a_write(number)], deadline=soon)
        await backend.read([a_read(number)], deadline=soon)
        await backend.exists([object_name(number)], deadline=soon)
    return set(backend.injected)


def test_without_any_rate_each_kind_comes_now_and_then() -> None:
    backend = make_backend("fault+memory://?fault.seed=3&fault.delay_ms=0")
    assert run(kinds_that_come(backend)) == set(Fault)
