"""Objects in a real Mooncake Store: the contract, registered memory, and concurrent writers."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.buffers import address_of
from lockstep.storage_backends.mooncake.backend import from_uri
from lockstep.storage_backends.mooncake.client import MooncakeClient
from lockstep.storage_backends.mooncake.memory import RegisteredMemory
from lockstep.storage_backends.mooncake.pieces import BufferPiece, Code
from lockstep.storage_backends.threaded_backend import Stop
from lockstep.storage_backends.uri import parse_uri
from tests.kit.servers.mooncake_master import MooncakeStore, pool
from tests.kit.servers.ports import free_port
from tests.kit.storage.calls import (
    KIB,
    StoreUnderTest,
    full_page,
    get,
    get_columns,
    object_name,
    opened,
    page,
    put,
    put_columns,
    reading,
    run,
    soon,
    soon_off_loop,
    writing,
)
from tests.kit.storage.contract import StorageContract


def anything(_: RegisteredMemory, views: Sequence[memoryview]) -> bool:
    return True


class TestMooncakeContract(StorageContract):
    @pytest.fixture(params=["copied", "straight"])
    def store(
        self,
        request: pytest.FixtureRequest,
        shared: MooncakeStore,
        monkeypatch: pytest.MonkeyPatch,
    ) -> StoreUnderTest:
        if request.param == "straight":
            # Write without staging memory. The contract's buffers are not registered, but over TCP
            # Mooncake can use them anyway.
            monkeypatch.setattr(RegisteredMemory, "covers", anything)
        return shared


class TestMemory:
    async def test_pages_in_the_pool_are_written_without_a_copy(
        self, shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = pool(8 << 20)
        pages = [memory[n << 20 : (n + 1) << 20] for n in range(4)]
        back = [memory[n << 20 : (n + 1) << 20] for n in range(4, 8)]

        monkeypatch.setattr("lockstep.storage_backends.mooncake.writes.staging_views", None)
        async with opened(shared, [memory]) as backend:
            for number, each in enumerate(pages):
                each[:] = page(number, 1 << 20)
            writes = [writing(object_name(n), each) for n, each in enumerate(pages)]
            assert set(await backend.write(writes, deadline=soon())) == {WriteOutcome.OK}
            reads = [reading(object_name(n), each) for n, each in enumerate(back)]
            assert set(await backend.read(reads, deadline=soon())) == {ReadOutcome.OK}
            assert back == pages

    async def test_a_page_larger_than_our_own_memory_goes_through_it_in_pieces(
        self, shared: MooncakeStore
    ) -> None:
        nbytes = (9 << 20) + 5

        async with opened(shared) as backend:
            assert await put(backend, object_name(1), page(1, nbytes)) is WriteOutcome.OK
            assert await get(backend, object_name(1), nbytes) == (
                ReadOutcome.OK,
                page(1, nbytes),
            )

    def test_only_what_lies_in_the_pool_from_end_to_end_is_covered(
        self, shared: MooncakeStore
    ) -> None:
        around = pool(16 * KIB)
        client = shared.lend(shared.settings())
        registered = RegisteredMemory(client, [around[4 * KIB : 8 * KIB], around[12 * KIB :]])
        cases = {(4, 8): True, (5, 6): True, (12, 16): True, (3, 5): False, (7, 13): False}
        views = {(start, end): around[start * KIB : end * KIB] for start, end in cases}
        first = around[4 * KIB : 5 * KIB]
        assert {case: registered.covers([view]) for case, view in views.items()} == cases
        assert {case: registered.covers([first, view]) for case, view in views.items()} == cases
        client.close()

    async def test_closing_gives_the_pool_back(self, shared: MooncakeStore) -> None:
        memory = pool(64 * KIB)

        # The second backend uses the same client as the first, and registers the same memory.
        for _ in range(2):
            async with opened(shared, [memory]) as backend:
                await put(backend, object_name(1), memory)


class TestLeases:
    """The master leases an object to a reader; the library drops reads that outlast this lease."""

    @pytest.mark.parametrize(
        ("nbytes", "part", "parts"),
        [(16 * KIB, 0, 1), (5 << 20, 1, 3)],
        ids=["in one piece", "after its header"],
    )
    async def test_an_object_whose_lease_runs_out_on_the_way_is_read_under_another(
        self,
        shared: MooncakeStore,
        monkeypatch: pytest.MonkeyPatch,
        nbytes: int,
        part: int,
        parts: int,
    ) -> None:
        leases_end = [lambda: None] * part + [shared.outlast_leases] + [lambda: None] * parts
        fetch, fetched = MooncakeClient.fetch, list[object]()

        def late(*arguments: Any) -> list[int]:
            leases_end[len(fetched)]()
            fetched.append(arguments)
            return fetch(*arguments)

        async with opened(shared) as backend:
            await put(backend, object_name(1), page(1, nbytes))
            monkeypatch.setattr(MooncakeClient, "fetch", late)
            assert await get(backend, object_name(1), nbytes) == (ReadOutcome.OK, page(1, nbytes))
            assert len(fetched) == parts

    def test_a_reader_goes_on_where_another_has_lost_the_lease_that_they_share(
        self, shared: MooncakeStore
    ) -> None:
        class AfterOneLook(Stop):
            def due(self) -> bool:
                before, self.requested = self.requested, True
                return before

        memory = pool(KIB)
        pieces = [[BufferPiece(address_of(memory), KIB, 0)]]
        content = bytes(page(1, KIB))
        assert shared.owner.put("shared", content) == 0
        client = shared.lend(shared.settings())
        assert client.register(address_of(memory), KIB)
        with client.reading(["shared"]) as first:
            with client.reading(["shared"]) as second:
                assert first == second == [0]
                shared.outlast_leases()
                given_up = client.fetch(["shared"], pieces, AfterOneLook(soon_off_loop()))
                assert given_up == [Code.MASTER_LATE]
            assert client.fetch(["shared"], pieces, Stop(soon_off_loop())) == [KIB]
        assert memory == content
        client.close()


class TestWriters:
    async def test_who_waits_for_a_writer_that_never_ends_is_late_and_not_blocked(
        self, shared: MooncakeStore
    ) -> None:
        other = shared.lend(shared.settings())
        key = shared.key(object_name(1))
        assert other.begin([key], [HEADER_BYTES + 16 * KIB]) == [0]

        async with opened(shared) as backend:
            assert await backend.exists([object_name(1)], deadline=soon()) == [False]
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
            writes = [writing(object_name(1), page(1))]
            (outcome,) = await backend.write(writes, deadline=time.monotonic() + 0.1)
            assert outcome is WriteOutcome.TIMED_OUT
            other.give_up([key])
            assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK
        other.close()

    async def test_a_key_that_stands_twice_in_a_call_is_written_once(
        self, shared: MooncakeStore
    ) -> None:
        async with opened(shared) as backend:
            writes = [writing(object_name(1), page(n)) for n in range(3)]
            assert await backend.write(writes, deadline=soon()) == [
                WriteOutcome.OK,
                WriteOutcome.PRESENT,
                WriteOutcome.PRESENT,
            ]
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(0))

    async def test_an_object_that_was_just_read_can_be_removed(self, shared: MooncakeStore) -> None:
        async with opened(shared) as backend:
            await put(backend, object_name(1), page(1))
            await get(backend, object_name(1))
            # While a reader's lease lasts, an unforced removal fails with -706.
            assert shared.owner.remove(shared.key(object_name(1))) == -706
            assert await backend.remove([object_name(1)], deadline=soon()) == [True]
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING

    async def test_of_an_object_that_was_replaced_only_the_fuller_one_is_left(
        self, shared: MooncakeStore
    ) -> None:
        async with opened(shared) as backend:
            first = shared.key(object_name(1))
            for present in (0, 0b001, 0b011, 0b111):
                await put_columns(backend, object_name(1), present)
            assert shared.key(object_name(1)) != first
            assert shared.owner.is_exist(first) == 0
            assert await backend.exists([object_name(1)], deadline=soon()) == [True]
            assert await get_columns(backend, object_name(1), 0b101) == (
                ReadOutcome.OK,
                full_page(0b101),
            )
            assert await backend.remove([object_name(1)], deadline=soon()) == [True]
            assert (await get_columns(backend, object_name(1), 0))[0] is ReadOutcome.MISSING


class TestOpening:
    @pytest.mark.parametrize("host", ["127.0.0.1", "a..b"])
    def test_a_master_that_is_not_there_is_refused_by_name(self, host: str) -> None:
        pytest.importorskip("mooncake.store", reason="needs the extra mooncake")
        address = f"{host}:{free_port()}"
        backend = from_uri(parse_uri(f"mooncake://{address}"))
        with pytest.raises(ConfigError, match=f"{address}: no master answers"):
            run(backend.open())
        run(backend.close())

    @pytest.mark.parametrize(
        ("uri", "complaint"),
        [
            ("mooncake://", "must name the master"),
            ("mooncake://host:0", "must name the master"),
            (f"mooncake://host:{'9' * 5000}", "must name the master"),
            ("mooncake://host:1?device=\ud800", "half a character"),
            ("mooncake://host:1/path", "has a path"),
            ("mooncake://host:1?replicas=0", "must be at least 1"),
            ("mooncake://host:1?segment=5", "there is no option 'segment'"),
        ],
    )
    def test_a_uri_that_makes_no_sense_is_refused(self, uri: str, complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            from_uri(parse_uri(uri))
