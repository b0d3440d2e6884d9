"""A Mooncake Store with dead owners, with disks, when full, and with a stopped or restarted master."""

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.cli.environment import MOONCAKE_TIMEOUTS, prepare_for_mooncake
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.buffers import address_of
from lockstep.storage_backends.mooncake.backend import THREADS, MooncakeBackend
from lockstep.storage_backends.mooncake.client import left_behind
from lockstep.storage_backends.mooncake.pieces import BufferPiece, Code
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.servers.mooncake_master import (
    Begun,
    MooncakeStore,
    a_store,
    brought_back,
    pool,
    process,
    usable,
)
from tests.kit.servers.processes import stopped_process, until
from tests.kit.storage.calls import (
    KIB,
    eventually,
    found,
    get,
    get_many,
    object_name,
    opened,
    page,
    put,
    put_many,
    reading,
    soon,
    soon_off_loop,
    writing,
    wrongly_served,
)


@pytest.fixture(scope="module")
def mooncake_store() -> Generator[MooncakeStore]:
    """One store for all tests of this module. It fills up, because objects stay leased for a minute."""
    with a_store("--default_kv_lease_ttl=60000", segment_bytes=32 << 20) as store:
        yield store


class Lonely(NamedTuple):
    """A store, and the single other process that owns all of its memory."""

    store: MooncakeStore
    owner: "subprocess.Popen[str]"


@pytest.fixture(scope="class")
def lonely() -> Generator[Lonely]:
    """A store with a single owner process; the library waits at most 1 s for this process.

    A test that stops the owner resumes it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in MOONCAKE_TIMEOUTS:
            patch.setenv(name, "1")
        prepare_for_mooncake()
        assert {os.environ[name] for name in MOONCAKE_TIMEOUTS} == {"1"}
        # If the client TTL were short, the master would drop the owner while the owner is stopped.
        with a_store("--client_ttl=60", segment_bytes=0) as store, process("own", store) as owner:
            yield Lonely(store, owner)


class TestManyProcesses:
    async def test_one_process_reads_from_the_memory_of_another_and_cannot_overwrite_it(
        self, lonely: Lonely
    ) -> None:
        async with opened(lonely.store) as second:
            assert await put(second, object_name(1), page(9)) is WriteOutcome.PRESENT
            assert await get_many(second, range(4)) == found(range(4))
            assert await put(second, object_name(9), page(9)) is WriteOutcome.OK

    async def test_a_stopped_owner_holds_one_object_of_a_write_and_no_read_beyond_its_deadline(
        self, lonely: Lonely
    ) -> None:
        memory = pool(16 * 16 * KIB)
        views = [memory[n * 16 * KIB : (n + 1) * 16 * KIB] for n in range(16)]

        async with (
            opened(lonely.store, [memory]) as straight,
            opened(lonely.store) as copying,
        ):
            some = [views[start : start + 4] for start in range(0, 16, 4)]
            reads = [[reading(object_name(n), each[n]) for n in range(4)] for each in some[:2]]
            writes = [
                [writing(object_name(10 * at + n), each[n]) for n in range(4)]
                for at, each in enumerate(some[2:], start=2)
            ]
            calls = list(zip((straight, copying), reads, writes, strict=True))
            before = [await backend.read(some, deadline=soon()) for backend, some, _ in calls]
            assert before == [[ReadOutcome.OK] * 4] * 2
            with stopped_process(lonely.owner.pid):
                # This deadline of 0.8 s is earlier than the library's timeout of 1 s for the stopped
                # owner.
                late = time.monotonic() + 0.8
                read, written = await asyncio.gather(
                    asyncio.gather(*[one.read(some, deadline=late) for one, some, _ in calls]),
                    asyncio.gather(*[one.write(some, deadline=late) for one, _, some in calls]),
                )
            assert read == [[ReadOutcome.TIMED_OUT] * 4] * 2
            assert written == [[WriteOutcome.FAILED] + [WriteOutcome.TIMED_OUT] * 3] * 2

    async def test_existence_outlives_the_owner_and_the_read_decides(self) -> None:
        names = [object_name(number) for number in range(4)]

        flags = "--client_ttl=60"
        with a_store(flags, segment_bytes=0) as store, process("own", store) as owner:
            async with opened(store) as backend:
                assert await backend.exists(names, deadline=soon()) == [True] * 4
                owner.kill()
                owner.wait()
                assert await backend.exists(names, deadline=soon()) == [True] * 4
                outcomes = [(await get(backend, name))[0] for name in names]
                assert outcomes == [ReadOutcome.FAILED] * 4
                assert await put(backend, names[0], page(9)) is WriteOutcome.FAILED
                # An object that cannot be read is not removed as corrupt: its owner may only be
                # unreachable.
                assert await backend.exists(names, deadline=soon()) == [True] * 4

    @pytest.mark.slow
    async def test_what_a_dead_owner_had_is_missing_once_the_master_has_let_go_of_it(self) -> None:
        names = [object_name(number) for number in range(4)]

        with a_store(segment_bytes=0) as store, process("own", store) as owner:
            async with opened(store) as backend:

                async def all_are_gone() -> bool:
                    return not any(await backend.exists(names, deadline=soon()))

                owner.kill()
                owner.wait()
                await eventually(all_are_gone)
                assert (await get(backend, names[0]))[0] is ReadOutcome.MISSING


class TestDisks:
    @pytest.mark.slow
    async def test_other_bytes_that_a_reused_directory_brings_back_are_corrupt_and_go(
        self, tmp_path: Path
    ) -> None:
        names = [object_name(0), object_name(1)]

        with brought_back(tmp_path) as store:
            async with opened(store) as backend:

                async def both_are_back() -> bool:
                    return all(await backend.exists(names, deadline=soon()))

                await eventually(both_are_back)
                assert (await get(backend, names[0]))[0] is ReadOutcome.CORRUPT
                assert (await get(backend, names[0]))[0] is ReadOutcome.MISSING
                assert await put(backend, names[0], page(0)) is WriteOutcome.OK
                assert await get_many(backend, range(2)) == found(range(2))


class TestFullStore:
    async def test_writes_that_find_no_room_are_failed(self, shared: MooncakeStore) -> None:
        async with opened(shared) as backend:
            outcomes = await put_many(backend, range(40), 1 << 20)
            assert set(outcomes) == {WriteOutcome.OK, WriteOutcome.FAILED}
            # A failed write does not block a later write of the same object.
            late = object_name(outcomes.index(WriteOutcome.FAILED))
            shared.clear()
            assert await put(backend, late, page(1)) is WriteOutcome.OK

    async def test_a_store_whose_members_give_no_memory_says_so_once_and_what_to_do(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with a_store(segment_bytes=0) as store, caplog.at_level(logging.WARNING):
            async with opened(store) as backend:
                written = [await put(backend, object_name(n), page(1)) for n in range(3)]
            address = store.master.address

        assert written == [WriteOutcome.FAILED] * 3
        warnings = [
            each.getMessage() for each in caplog.records if "no process has" in each.getMessage()
        ]
        remedy = "start a process that owns a segment, or give segment_bytes=N"
        assert warnings == [
            f"store mooncake://{address}: no process has free memory for the store: {remedy}"
        ]


class TestMaster:
    async def test_what_a_stopped_master_holds_is_waited_for_and_what_has_not_begun_is_late(
        self, shared: MooncakeStore, begun: Begun
    ) -> None:
        async with opened(shared) as backend:
            await put_many(backend, range(THREADS))
            begun.forget()
            with shared.master.stopped():
                held = [asyncio.create_task(get(backend, object_name(n))) for n in range(THREADS)]
                await begun.wait(THREADS)
                reads = [reading(object_name(0), bytearray(16 * KIB))]
                late = await backend.read(reads, deadline=time.monotonic() + 0.05)
                assert late == [ReadOutcome.TIMED_OUT]
                assert not any(call.done() for call in held)
            assert wrongly_served(range(THREADS), await asyncio.gather(*held)) == []
            await usable(backend, 100)

    async def test_a_write_that_was_given_up_while_the_master_was_stopped_is_not_half_there(
        self, shared: MooncakeStore, begun: Begun
    ) -> None:
        async with opened(shared) as backend:
            with shared.master.stopped():
                content = page(1)
                call = asyncio.create_task(put(backend, object_name(1), content))
                await begun.wait()
                call.cancel()
                # A cancelled call returns only once the library no longer uses the call's buffer.
                await asyncio.wait([call], timeout=0.1)
                assert not call.done()
            with pytest.raises(asyncio.CancelledError):
                await call
            content[:] = bytes(16 * KIB)
            await usable(backend, 1)

    async def test_closing_ends_while_the_master_is_stopped(
        self, shared: MooncakeStore, begun: Begun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lockstep.storage_backends.threaded_backend.CLOSE_TIMEOUT_S", 0.1)

        backend = shared.backend()
        await backend.open()
        with shared.master.stopped():
            held = asyncio.create_task(get(backend, object_name(1)))
            await begun.wait()
            await backend.close()
            assert not held.done()
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED
        await held

    async def test_a_process_goes_on_when_it_leaves_a_store_with_a_stopped_master_or_enters_it(
        self, shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lockstep.storage_backends.mooncake.client._REACH_TIMEOUT_S", 0.2)

        owner = MooncakeBackend(shared.settings(segment_bytes=16 << 20))
        await owner.open()
        with shared.master.stopped():
            # The close must not wait for the stopped master: that would block all threads for a minute.
            async with asyncio.timeout(25):
                await owner.close()
                with pytest.raises(ConfigError, match="no master answers"):
                    await MooncakeBackend(shared.settings()).open()
        left_behind.pop().close()

    async def test_a_restarted_master_has_lost_its_keys_and_takes_new_ones(
        self, shared: MooncakeStore
    ) -> None:
        shared.link_often()
        async with opened(shared) as backend:
            await put(backend, object_name(1), page(1))
            shared.master.kill()
            written, (read, _), exist, removed = await asyncio.gather(
                put(backend, object_name(2), page(2)),
                get(backend, object_name(1)),
                backend.exists([object_name(1)], deadline=soon()),
                backend.remove([object_name(1)], deadline=soon()),
            )
            assert (written, read) == (WriteOutcome.FAILED, ReadOutcome.FAILED)
            assert (exist, removed) == ([False], [False])
            shared.master.begin()
            await usable(backend, 2)
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING

    def test_a_write_that_the_master_did_not_live_to_see_the_end_of_can_be_repeated(
        self, shared: MooncakeStore
    ) -> None:
        shared.link_often()
        client = shared.lend(shared.settings())
        memory = pool(4 * KIB)
        assert client.register(address_of(memory), len(memory))
        assert client.begin(["unfinished"], [4 * KIB]) == [0]
        shared.master.kill()
        pieces = [[BufferPiece(address_of(memory), 4 * KIB, 0)]]
        sent = client.send(["unfinished"], pieces, Stop(soon_off_loop()))
        assert sent == [4 * KIB]
        assert client.finish(["unfinished"])[0] in (Code.NO_MASTER, Code.MASTER_LATE)
        shared.master.begin()
        until(lambda: client.begin(["unfinished"], [4 * KIB]) == [0])
        client.give_up(["unfinished"])
        client.close()
