"""Abandoned reads of a Mooncake Store: bytes that arrive late never reach the caller's memory."""

import asyncio
import ctypes
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain

import pytest

from lockstep.ranks.protocol.transfer_engine_settings import Protocol
from lockstep.storage_backends.base import ReadOutcome, StorageBackend
from lockstep.storage_backends.mooncake import memory as mooncake_memory
from lockstep.storage_backends.mooncake.backend import THREADS, MooncakeBackend
from lockstep.storage_backends.mooncake.client import MooncakeClient, MooncakeSettings
from lockstep.storage_backends.mooncake.pieces import BufferPiece, Code
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.servers.mooncake_master import Begun, LentClient, MooncakeStore, pool
from tests.kit.servers.processes import until
from tests.kit.storage.calls import KIB, get, object_name, opened, page, put, reading, run, soon

OLD = bytes([0xAA]) * (16 * KIB)
"""Initial content of a buffer, which shows that no read has filled it."""


class GivingUp(LentClient):
    """A client that abandons every transfer; the test decides when the bytes arrive, as RDMA might."""

    keys_requested = 0
    pending: tuple[BufferPiece, ...] = ()

    def fetch(
        self, keys: list[str], pieces: Sequence[Sequence[BufferPiece]], stop: Stop
    ) -> list[int]:
        self.keys_requested += len(keys)
        self.pending += tuple(chain.from_iterable(pieces))
        return [int(Code.NOT_TRANSFERRED)] * len(keys)

    def arrive(self) -> None:
        for piece in self.pending:
            ctypes.memset(piece.address, 0x55, piece.nbytes)


class Late:
    def __init__(self, store: MooncakeStore, protocol: Protocol = "rdma") -> None:
        self._store = store
        self._settings = replace(store.settings(), protocol=protocol)

    @asynccontextmanager
    async def opened(self, memory: Sequence[memoryview] = ()) -> AsyncGenerator[MooncakeBackend]:
        backend = MooncakeBackend(self._settings, self._lend)
        await backend.open(memory)
        yield backend
        await backend.close()

    def _lend(self, settings: MooncakeSettings) -> MooncakeClient:
        self.client = self._store.lend_as(GivingUp, settings)
        return self.client


async def test_what_arrives_after_the_library_gave_it_up_changes_nothing_of_the_caller_s(
    shared: MooncakeStore,
) -> None:
    memory = pool(16 * KIB)
    memory[:] = OLD
    late = Late(shared)

    async with opened(shared) as sound, late.opened([memory]) as backend:
        await put(sound, object_name(1), page(1))
        reads = [reading(object_name(1), memory)]
        assert await backend.read(reads, deadline=soon()) == [ReadOutcome.FAILED]
        late.client.arrive()
    assert memory == OLD


def test_memory_that_something_may_still_arrive_in_is_never_used_again_and_is_bounded(
    shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mooncake_memory, "WRITTEN_OFF_MAX", 2)
    late = Late(shared)

    async def scenario() -> list[ReadOutcome]:
        async with opened(shared) as sound, late.opened() as backend:
            await put(sound, object_name(1), page(1))
            return [(await get(backend, object_name(1)))[0] for _ in range(4)]

    with caplog.at_level(logging.WARNING):
        assert run(scenario()) == [ReadOutcome.FAILED] * 4
    assert late.client.keys_requested == 2
    assert len({piece.address for piece in late.client.pending}) == 2
    warnings = [
        each.getMessage() for each in caplog.records if "may still receive" in each.getMessage()
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith("2 failed reads from a Mooncake Store")


async def test_over_tcp_the_library_hangs_up_first_and_nothing_is_written_off(
    shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_memory, "WRITTEN_OFF_MAX", 2)
    late = Late(shared, "tcp")

    async with opened(shared) as sound, late.opened() as backend:
        await put(sound, object_name(1), page(1))
        outcomes = [(await get(backend, object_name(1)))[0] for _ in range(4)]
        assert outcomes == [ReadOutcome.FAILED] * 4
    assert late.client.keys_requested == 4


class TestStoppedMaster:
    @pytest.mark.parametrize(("timeout_s", "cancelled"), [(0.2, False), (600.0, True)])
    async def test_a_read_that_it_holds_ends_without_it_and_never_reaches_the_buffer(
        self, shared: MooncakeStore, begun: Begun, timeout_s: float, *, cancelled: bool
    ) -> None:
        memory = pool(16 * KIB)

        async with opened(shared, [memory]) as backend:
            await put(backend, object_name(1), page(1))
            begun.forget()
            with shared.master.stopped():
                reads = [reading(object_name(1), memory)]
                deadline = time.monotonic() + timeout_s
                call = asyncio.create_task(backend.read(reads, deadline=deadline))
                await begun.wait()
                await asyncio.wait([call], timeout=0 if cancelled else None)
                call.cancel()
                await asyncio.wait([call])
                assert call.cancelled() or call.result() == [ReadOutcome.TIMED_OUT]
                memory[:] = OLD
            await asyncio.to_thread(until, lambda: not held(backend))
            assert memory == OLD
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))

    async def test_while_reads_that_were_given_up_hold_every_thread_others_are_failed_at_once(
        self, shared: MooncakeStore, begun: Begun
    ) -> None:
        async with opened(shared) as backend:
            await put(backend, object_name(1), page(1))
            begun.forget()
            with shared.master.stopped():
                calls = asyncio.gather(*[get(backend, object_name(1)) for _ in range(THREADS)])
                await begun.wait(THREADS)
                calls.cancel()
                await asyncio.wait([calls])
                assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED
            await asyncio.to_thread(until, lambda: not held(backend))
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))


def held(backend: StorageBackend) -> int:
    assert isinstance(backend, MooncakeBackend)
    calls = backend._calls  # pyright: ignore[reportPrivateUsage]
    assert calls is not None
    return calls.left
