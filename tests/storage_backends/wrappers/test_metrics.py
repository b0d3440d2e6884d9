"""`metrics+` counts every outcome under its name and puts latencies into their buckets."""

import asyncio

import pytest

from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.base import Read
from lockstep.storage_backends.latencies import BOUNDS_S
from lockstep.storage_backends.wrappers.base import Call
from lockstep.storage_backends.wrappers.metrics import MetricsBackend
from tests.kit.storage.calls import EVERY, columns, digest_of, now, object_name, put_columns
from tests.kit.storage.layers import (
    PAGE_BYTES,
    Failing,
    Watched,
    a_while,
    memory_store,
    reads_of,
    writes_of,
)

pytestmark = pytest.mark.virtual_time


async def test_every_outcome_is_counted_under_its_name() -> None:
    store = await memory_store([1, 2, 3])
    await put_columns(store, object_name(4), 0)
    backend = MetricsBackend(Failing(store, {3: 1, 9: 1}), clock=now)
    store.shelf.objects[digest_of(object_name(2))] = (bytes(HEADER_BYTES), bytes(PAGE_BYTES))
    full = columns(EVERY)
    lacking = Read(object_name(4), (memoryview(bytearray(full.nbytes)),), full)
    await backend.read([*reads_of(1, 2, 3, 7), lacking], deadline=a_while())
    await backend.read(reads_of(1, 3), deadline=now())
    await backend.write(writes_of(1, 5, 9), deadline=a_while())
    await backend.write(writes_of(6), deadline=now())
    await backend.exists([object_name(1), object_name(8)], deadline=a_while())
    await backend.remove([object_name(1)], deadline=a_while())
    await backend.remove([object_name(1)], deadline=now())
    seen = backend.log.metrics()
    assert seen[Call.READ].outcomes == {
        "ok": 1,
        "corrupt": 1,
        "failed": 1,
        "missing": 1,
        "lacking": 1,
        "timed_out": 2,
    }
    assert seen[Call.WRITE].outcomes == {"present": 1, "ok": 1, "failed": 1, "timed_out": 1}
    assert seen[Call.EXISTS].outcomes == {"yes": 1, "no": 1}
    assert seen[Call.REMOVE].outcomes == {"free": 1, "taken": 1}
    assert (seen[Call.READ].nbytes, seen[Call.WRITE].nbytes) == (PAGE_BYTES, PAGE_BYTES)
    assert sum(seen[Call.READ].took.counts) == 2


async def test_latencies_fall_into_the_bucket_whose_bound_is_the_next_above() -> None:
    took_s = [0.00001, 0.0003, 0.0004, 2.4, 2.6, 1000.0]

    watched = Watched(await memory_store([1]))
    backend = MetricsBackend(watched, clock=now)
    for each in took_s:
        watched.before = lambda: asyncio.sleep(each * 0.99)
        await backend.read(reads_of(1), deadline=a_while())
    seen = backend.log.metrics()[Call.READ]
    bounds = [*BOUNDS_S, float("inf")]
    filled = {bound: n for bound, n in zip(bounds, seen.took.counts, strict=True) if n}
    assert filled == pytest.approx({1e-5: 1, 5e-4: 2, 2.5: 1, 5.0: 1, float("inf"): 1})
    assert seen.took.sum_s == pytest.approx(sum(took_s) * 0.99)


async def test_calls_in_flight_and_calls_that_were_cancelled_are_told_apart() -> None:
    watched = Watched(await memory_store([1]))
    backend = MetricsBackend(watched, clock=now)
    gate = asyncio.Event()
    watched.before = gate.wait
    calls = [asyncio.create_task(backend.read(reads_of(1), deadline=a_while())) for _ in range(3)]
    await asyncio.sleep(0)
    assert backend.log.metrics()[Call.READ].in_flight == 3
    calls[0].cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls, return_exceptions=True)
    seen = backend.log.metrics()[Call.READ]
    assert (seen.in_flight, seen.interrupted, sum(seen.took.counts)) == (0, 1, 2)
    assert seen.outcomes == {"ok": 2}
