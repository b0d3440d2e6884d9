"""`3fs://` with indexes that do not answer, full stores, and read-only stores."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.records.manifest import claim_model
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.three_fs.backend import ThreeFsBackend
from tests.kit.launch.in_process import Run
from tests.kit.launch.stores import LAYOUT
from tests.kit.storage.calls import (
    get,
    listed,
    object_name,
    opened,
    opened_at,
    page,
    put,
    put_each,
    reading,
    run,
    soon,
    writing,
)
from tests.kit.storage.three_fs import small_store, watched

A_WHILE_S = 15.0
"""Seconds after which a call counts as hung."""


def let_time_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the clock past the deadline of every call in flight."""
    real_time = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_time() + 1000)


def the_call(
    backend: ThreeFsBackend, method: str, buffer: bytearray, deadline: float
) -> Coroutine[Any, Any, list[Any]]:
    match method:
        case "exists":
            return backend.exists([object_name(99)], deadline=deadline)
        case "remove":
            return backend.remove([object_name(1)], deadline=deadline)
        case "read":
            return backend.read([reading(object_name(1), buffer)], deadline=deadline)
        case _:
            return backend.write([writing(object_name(2), page(2))], deadline=deadline)


CALLS = pytest.mark.parametrize(
    ("method", "held", "late"),
    [
        ("exists", "look_up", False),
        ("remove", "remove", False),
        ("read", "look_up", ReadOutcome.TIMED_OUT),
        ("read", "confirm", ReadOutcome.TIMED_OUT),
        ("write", "look_up", WriteOutcome.TIMED_OUT),
        ("write", "reserve", WriteOutcome.TIMED_OUT),
        ("write", "commit", WriteOutcome.TIMED_OUT),
    ],
)


@asynccontextmanager
async def held_up(folder: Path, method: str, held: str) -> AsyncGenerator[asyncio.Task[list[Any]]]:
    """Yield a call of `method` that hangs in the index; then check that later calls succeed."""
    async with watched(small_store(folder)) as (backend, index):
        await put(backend, object_name(1), page(1))
        with index.holding(held):
            buffer = bytearray(16 << 10)
            call = asyncio.create_task(the_call(backend, method, buffer, soon()))
            await index.held()
            yield call
        assert await put(backend, object_name(3), page(3)) is WriteOutcome.OK
        assert await get(backend, object_name(3)) == (ReadOutcome.OK, page(3))


@CALLS
async def test_a_call_that_an_index_does_not_answer_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, held: str, late: object
) -> None:
    async with held_up(tmp_path, method, held) as call:
        let_time_pass(monkeypatch)
        async with asyncio.timeout(A_WHILE_S):
            assert await call == [late]


@CALLS
async def test_a_call_that_an_index_does_not_answer_can_be_cancelled(
    tmp_path: Path, method: str, held: str, late: object
) -> None:
    async with held_up(tmp_path, method, held) as call:
        call.cancel()
        await asyncio.wait([call], timeout=A_WHILE_S)
        assert call.cancelled()


async def test_slots_that_come_too_late_for_their_writer_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(small_store(tmp_path, file_slots=1, files=1)) as (backend, index):
        with index.holding("reserve"):
            writing_late = asyncio.create_task(put(backend, object_name(1), page(1)))
            await index.held()
            let_time_pass(monkeypatch)
            assert await writing_late is WriteOutcome.TIMED_OUT
        await index.released()
        assert await put(backend, object_name(2), page(2)) is WriteOutcome.OK


@pytest.mark.parametrize("there", ["", "above/store"])
def test_an_open_that_fails_leaves_nothing_behind(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = list(tmp_path.rglob("*"))

    uri = f"3fs://{tmp_path}/above/store?index=sqlite://{tmp_path}/nodir/index.db"
    with pytest.raises(ConfigError, match=r"there is no directory .*/nodir; create it"):
        run(make_backend(uri).open())

    assert list(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("mode", "message", "trust"),
    [(0o1777, "by everybody.*chmod go-w", "any"), (0o770, "by group [0-9]+,.*chmod g-w", "group")],
)
async def test_a_directory_that_others_can_put_files_into_is_refused_unless_they_are_trusted(
    tmp_path: Path, mode: int, message: str, trust: str
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    uri = f"3fs://{root}?index=sqlite://{root}/index/i.db&slot_bytes=32768&file_slots=4"

    with pytest.raises(ConfigError, match=message):
        await make_backend(uri).open()
    assert not list(root.iterdir())

    async with opened_at(f"{uri}&trust={trust}") as backend:
        assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK


async def test_a_full_store_keeps_its_records_until_they_are_removed(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    mark = ObjectName("ab" * 32, "ab" * 32, "sharding", "stage0of1.tp2")

    async with opened(store) as backend:
        await claim_model(backend, "m", "1", {"kv": LAYOUT}, soon())
        assert await put(backend, mark, b"\1") is WriteOutcome.OK
        results = [
            (await put(backend, object_name(n), page(n)), await get(backend, mark, 1))
            for n in range(30)
        ]
        assert results == [(WriteOutcome.OK, (ReadOutcome.OK, bytearray(b"\1")))] * 30
        assert len(await listed(backend)) == 8
        names = [stored.name for stored in await listed(backend)]
        assert await backend.remove(names, deadline=soon()) == [True] * 8
        assert await listed(backend) == []


def test_a_store_that_is_only_looked_at_says_so_and_stays_as_it_was(
    tmp_path: Path, lockstep: Run, caplog: pytest.LogCaptureFixture
) -> None:
    store = small_store(tmp_path)
    uri = f"3fs://{store.root}?index=sqlite://{store.index}"

    async def scenario() -> None:
        async with opened(store) as backend:
            for number in range(8):
                await put(backend, object_name(number), page(number))
        store.spoil(object_name(1))
        async with opened_at(f"{uri}&read_only=1") as looking:
            assert await get(looking, object_name(0)) == (ReadOutcome.OK, page(0))
            bad = [(await get(looking, object_name(1)))[0] for _ in range(2)]
            assert bad == [ReadOutcome.CORRUPT] * 2
            assert await put_each(looking, (9, 10, 11)) == {WriteOutcome.FAILED}
            names = [object_name(2), object_name(9)]
            assert await looking.remove(names, deadline=soon()) == [False, True]
            assert len(await listed(looking)) == 8

    run(scenario())
    (warning,) = [each for each in caplog.messages if "read-only" in each]
    assert f"store {uri}&read_only=1: it is open read-only, so nothing is written" in warning
    assert lockstep("verify", uri)[0] == 1

    async def fill_up() -> None:
        async with opened(store) as backend:
            # The read-only store recorded no use of page 0, so this page is the oldest and is evicted.
            await put(backend, object_name(8), page(8))
            assert (await get(backend, object_name(0)))[0] is ReadOutcome.MISSING

    run(fill_up())
