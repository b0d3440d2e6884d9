"""Reads from ranks that change, hang, break and die; and readers that cancel their reads."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.page_layout import PageLayout
from lockstep.ranks.protocol.allowed_sources import AllowedSources
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.storage_backends.base import ReadOutcome, StorageBackend
from lockstep.storage_backends.peer import connection
from lockstep.storage_backends.peer.backend import PeerBackend
from lockstep.storage_backends.peer.wire import (
    Forget,
    LocateReply,
    LookupReply,
    ReadReply,
    ReadRequest,
    State,
    encode,
)
from tests.kit.ranks.executor_parts import NAMESPACE, hashed_keys, plain_pages
from tests.kit.ranks.page_servers import ServedGroup, pages_of, reads_of, serving, serving_keys
from tests.kit.ranks.reference_pages import LATENT
from tests.kit.storage.calls import (
    KIB,
    eventually,
    get,
    get_many,
    now,
    object_name,
    opened_at,
    outcomes_of,
    page,
    put_many,
    reading,
    run,
    soon,
    using,
)
from tests.kit.storage.peer import FedStore
from tests.kit.storage.peer_impostors import Impostor, impostor

BYTES = 64 * KIB
LAYOUT = plain_pages(BYTES, heads=2)
UNTOUCHED = 0xEE
LARGE = plain_pages(24 << 20)
"""Pages larger than the sockets' buffers: no read completes while the reader's event loop is blocked.
"""
SIZE = 16 * KIB
ANSWERS: list[tuple[Callable[[int], bytes], str]] = [
    (lambda n: encode(LookupReply(n, b"\1")), "an answer without a request"),
    (lambda n: encode(ReadReply(n + 1, 0, b"\0")), "objects that were not requested"),
    (lambda n: encode(ReadReply(n, 1, b"\0")), "1 objects from position 1"),
    (lambda n: encode(ReadReply(n, 0, b"\0\0")), "2 objects from position 0"),
    (lambda n: encode(ReadReply(n, 0, b"")), "0 objects from position 0"),
    (lambda n: encode(ReadReply(n, 0, b"\3")), "1 objects from position 0"),
    (lambda n: encode(ReadReply(n, 0, b"\0"), 1), "with 1 bytes; expected 0 bytes"),
    (lambda n: encode(ReadReply(n, 0, b"\2"), 1 << 62), f"expected {HEADER_BYTES + SIZE} bytes"),
    (lambda n: encode(Forget(n)), "unexpected message Forget"),
    (lambda n: encode(LocateReply(n + 1, b"\2", (0,))), "locations that were not requested"),
    (lambda n: encode(LocateReply(n, b"\2\2", (0, 0)), 2 * HEADER_BYTES), "locations of"),
    (lambda n: encode(LocateReply(n, b"\2", ()), HEADER_BYTES), "locations of"),
    (lambda n: encode(LocateReply(n, b"\3", (0,)), HEADER_BYTES), "locations of"),
    (lambda n: encode(LocateReply(n, b"\2", (0,)), 1 << 62), "locations of"),
    (lambda n: b"\xff" * 12, "a message of 4294967295 bytes"),
    (lambda n: b"\1\0\0\0" + bytes(8) + b"\xc1", "cannot be read"),
]
"""Invalid replies to read request number `n` for one object, and the expected log line of each."""


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


class TestWhatIsBad:
    async def test_a_byte_that_changes_after_the_first_read_makes_the_page_corrupt_each_time(
        self,
    ) -> None:
        with serving_keys(3, LAYOUT) as group:
            async with opened_at(group.uri) as backend:
                reads, _ = reads_of(group, 3, UNTOUCHED)
                assert await backend.read(reads, deadline=soon()) == [ReadOutcome.OK] * 3
                group.objects[0].page_views(KV_POOL, [1])[0][BYTES - 1] ^= 1
                seen = [await backend.read(reads, deadline=soon()) for _ in range(2)]

        ok, corrupt = ReadOutcome.OK, ReadOutcome.CORRUPT
        assert seen == [[ok, corrupt, ok]] * 2

    async def test_a_part_that_is_wrong_is_found_by_whoever_wants_it_and_nobody_else(self) -> None:
        store = FedStore()
        with ExitStack() as stack:
            stack.callback(store.close)
            async with using(store.backend()) as backend:
                await put_many(backend, [1])
                store.spoil(object_name(1), SIZE - 1)
                assert await outcomes_of(backend, [1, 1]) == [ReadOutcome.CORRUPT]
                host = store.of_name[object_name(1)]
                host.page(object_name(1))[SIZE - 1] ^= 1
                assert await outcomes_of(backend, [1]) == [ReadOutcome.OK]

    async def test_a_rank_that_sends_other_bytes_than_its_header_says_is_found_out(self) -> None:
        async def lie(reader: Impostor) -> None:
            await reader.welcome()
            fetch = await reader.receive()
            assert isinstance(fetch, ReadRequest)
            whole = ReadReply(fetch.number, 0, bytes([State.WHOLE]))
            await reader.say(encode(whole, HEADER_BYTES + SIZE) + bytes(HEADER_BYTES + SIZE))
            await reader.hung_up()

        async with impostor(lie) as address, opened_at(f"peer://{address}") as backend:
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT


class TestMixedReads:
    async def test_large_and_small_pages_cut_in_any_way_arrive_as_they_are(self) -> None:
        store = FedStore()
        sizes = (1, SIZE, (1 << 20) - HEADER_BYTES, 1 << 20, (1 << 20) + 1, 3 << 20)
        with ExitStack() as stack:
            stack.callback(store.close)
            async with using(store.backend()) as backend:
                for at, nbytes in enumerate(sizes):
                    await put_many(backend, range(10 * at, 10 * at + 9), nbytes)
                seen = [
                    await get_many(backend, range(10 * at, 10 * at + 10), nbytes)
                    for at, nbytes in enumerate(sizes)
                ]

        assert [[outcome for outcome, _ in each] for each in seen] == [
            [ReadOutcome.OK] * 9 + [ReadOutcome.MISSING]
        ] * len(sizes)
        assert [[content for _, content in each[:9]] for each in seen] == [
            [page(number, nbytes) for number in range(10 * at, 10 * at + 9)]
            for at, nbytes in enumerate(sizes)
        ]

    async def test_many_calls_at_once_share_a_connection_and_little_room(self) -> None:
        with serving_keys(64, LAYOUT) as group:
            address = group.servers[0].address
            async with using(PeerBackend(address, inflight_bytes=3 * BYTES)) as backend:
                reads, buffers = reads_of(group, 64, UNTOUCHED)
                calls = [
                    backend.read(reads[at : at + 2], deadline=soon()) for at in range(0, 64, 2)
                ]
                lookups = [backend.exists([read.name], deadline=soon()) for read in reads[:8]]
                outcomes, there = await asyncio.gather(
                    asyncio.gather(*calls), asyncio.gather(*lookups)
                )

        assert outcomes == [[ReadOutcome.OK] * 2] * 32
        assert there == [[True]] * 8
        assert buffers == pages_of(group, 64)

    async def test_what_all_ranks_hold_alike_is_read_from_all_of_them(self) -> None:
        layout = PageLayout(page_tokens=2, columns=(LATENT,))
        keys = hashed_keys(16)
        with serving(layout, 2, pages=len(keys)) as group:
            group.serve(keys)
            shard = group.objects[0].pools[KV_POOL].layout
            names = [ObjectName(NAMESPACE, key.hex(), KV_POOL, shard.name) for key in keys]
            async with opened_at(group.uri) as backend:
                seen = [(await get(backend, name, shard.shape))[0] for name in names]
            sent = [server.sent().objects for server in group.servers]

        assert seen == [ReadOutcome.OK] * len(keys)
        assert sum(sent) == len(keys)
        assert min(sent) > 0


class TestGivingUp:
    async def test_a_read_that_is_cancelled_on_the_way_touches_nothing_more_and_the_next_goes_well(
        self,
    ) -> None:
        with serving_keys(3, LARGE) as group:
            async with opened_at(group.uri) as backend:
                reads, buffers = reads_of(group, 3, UNTOUCHED)
                call = asyncio.create_task(backend.read(reads, deadline=soon()))
                await eventually(lambda: begun(buffers[0]))
                call.cancel()
                await asyncio.wait([call])
                before = [bytes(buffer) for buffer in buffers]
                others, theirs = reads_of(group, 2, UNTOUCHED)
                after = await backend.read(others, deadline=soon())

        assert call.cancelled()
        assert [bytes(buffer) for buffer in buffers] == before
        assert buffers[2] == b"\xee" * len(buffers[2])
        assert after == [ReadOutcome.OK] * 2
        assert theirs == pages_of(group, 2)

    async def test_one_call_that_is_cancelled_leaves_others_on_the_connection_alone(self) -> None:
        with serving_keys(3, LARGE) as group:
            async with opened_at(group.uri) as backend:
                reads, buffers = reads_of(group, 3, UNTOUCHED)
                calls = [
                    asyncio.create_task(backend.read([read], deadline=soon())) for read in reads
                ]
                await eventually(lambda: begun(buffers[0]))
                for at in (0, 2):
                    calls[at].cancel()
                ended = await asyncio.gather(*calls, return_exceptions=True)

        assert ended[1] == [ReadOutcome.OK]
        assert [type(each) for each in (ended[0], ended[2])] == [asyncio.CancelledError] * 2
        assert buffers[1] == pages_of(group, 2)[1]
        assert buffers[2] == b"\xee" * len(buffers[2])

    async def test_a_rank_that_says_nothing_costs_a_call_its_deadline_and_is_asked_to_forget(
        self,
    ) -> None:
        received: asyncio.Queue[object] = asyncio.Queue()

        async def say_nothing(reader: Impostor) -> None:
            await reader.welcome()
            for _ in range(3):
                await received.put(await reader.receive())
            await reader.hung_up()

        async with impostor(say_nothing) as address, opened_at(f"peer://{address}") as backend:
            buffer = bytearray(SIZE)
            outcomes = await backend.read([reading(object_name(1), buffer)], deadline=now() + 0.05)
            request, forgotten = await received.get(), await received.get()
            there = await backend.exists([object_name(1)], deadline=now() + 0.05)

        assert outcomes == [ReadOutcome.TIMED_OUT]
        assert there == [False]
        assert isinstance(request, ReadRequest)
        assert forgotten == Forget(request.number)

    async def test_a_connection_that_is_silent_for_long_is_given_up_and_made_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connections: list[Impostor] = []

        async def say_nothing(reader: Impostor) -> None:
            connections.append(reader)
            await reader.welcome()
            await reader.hung_up()

        monkeypatch.setattr(connection, "SILENT_S", 0.0)
        async with impostor(say_nothing) as address, opened_at(f"peer://{address}") as backend:
            seen = [
                await backend.read(
                    [reading(object_name(1), bytearray(SIZE))], deadline=now() + 0.05
                )
                for _ in range(2)
            ]

        assert seen == [[ReadOutcome.TIMED_OUT]] * 2
        assert len(connections) == 2

    async def test_what_landed_before_the_deadline_counts_and_only_the_rest_is_late(self) -> None:
        async def half(reader: Impostor) -> None:
            await reader.welcome()
            fetch = await reader.receive()
            assert isinstance(fetch, ReadRequest)
            await reader.say(encode(ReadReply(fetch.number, 0, bytes([State.ABSENT]))))
            await reader.hung_up()

        async with impostor(half) as address, opened_at(f"peer://{address}") as backend:
            reads = [reading(object_name(n), bytearray(SIZE)) for n in range(2)]
            assert await backend.read(reads, deadline=now() + 0.05) == [
                ReadOutcome.MISSING,
                ReadOutcome.TIMED_OUT,
            ]


async def begun(buffer: bytearray) -> bool:
    return buffer[0] != UNTOUCHED


class TestBreaking:
    async def test_a_rank_that_dies_fails_what_was_asked_of_it_and_is_found_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with ExitStack() as stack:
            first = stack.enter_context(serving_keys(3, LARGE))
            backend = await stack_backend(first)
            reads, buffers = reads_of(first, 3, UNTOUCHED)
            call = asyncio.create_task(backend.read(reads, deadline=soon()))
            await eventually(lambda: begun(buffers[0]))
            await asyncio.to_thread(first.close)
            broken = await call
            while_gone = await backend.read(reads, deadline=soon())
            port = int(first.servers[0].address.rpartition(":")[2])
            stack.enter_context(serving_keys(3, LARGE, ports=[port]))
            again = await backend.read(reads, deadline=soon())
            await backend.close()

        assert set(broken) <= {ReadOutcome.OK, ReadOutcome.FAILED}
        assert broken[-1] is ReadOutcome.FAILED
        assert while_gone == [ReadOutcome.FAILED] * 3
        assert again == [ReadOutcome.OK] * 3
        assert len([each for each in warnings(caplog) if "until it is restored" in each]) == 1

    async def test_a_rank_that_hangs_up_while_nobody_waits_is_nothing_to_speak_of(self) -> None:
        reasons: list[str] = []

        async def leave(reader: Impostor) -> None:
            await reader.welcome()

        async def has_ended() -> bool:
            return bool(reasons)

        async with impostor(leave) as address:
            await connection.connect(
                address,
                b"",
                "store",
                inflight_bytes=1 << 20,
                broke=reasons.append,
                allowed=AllowedSources(),
            )
            await eventually(has_ended)

        assert reasons == [""]

    async def test_a_rank_of_another_group_in_a_dead_one_s_place_is_not_read_from(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with ExitStack() as stack:
            group = stack.enter_context(serving(LAYOUT, 2))
            group.serve(hashed_keys(1))
            port = int(group.servers[1].address.rpartition(":")[2])
            group.servers[1].close()
            stack.enter_context(serving_keys(1, LAYOUT, ports=[port]))
            backend = await stack_backend(group)
            other = group.objects[1].pools[KV_POOL].layout
            name = ObjectName(NAMESPACE, hashed_keys(1)[0].hex(), KV_POOL, other.name)
            outcome, _ = await get(backend, name, other.shape)
            await backend.close()

        assert outcome is ReadOutcome.FAILED
        assert "belongs to another group" in caplog.text

    @pytest.mark.parametrize(
        ("answer", "message"),
        ANSWERS,
    )
    async def test_an_answer_that_makes_no_sense_ends_the_connection_with_one_line(
        self, answer: Callable[[int], bytes], message: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def babble(reader: Impostor) -> None:
            await reader.welcome()
            fetch = await reader.receive()
            assert isinstance(fetch, ReadRequest)
            await reader.say(answer(fetch.number))
            await reader.hung_up()

        async with impostor(babble) as address, opened_at(f"peer://{address}") as backend:
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED

        (line,) = warnings(caplog)
        assert message in line

    @given(st.binary(min_size=1, max_size=200))
    @settings(max_examples=30)
    def test_any_garbage_in_place_of_an_answer_costs_the_call_and_nothing_else(
        self, garbage: bytes
    ) -> None:
        async def babble(reader: Impostor) -> None:
            await reader.welcome()
            await reader.receive()
            await reader.say(garbage)

        async def scenario() -> ReadOutcome:
            async with impostor(babble) as address, opened_at(f"peer://{address}") as backend:
                return (await get(backend, object_name(1)))[0]

        assert run(scenario()) in {ReadOutcome.FAILED, ReadOutcome.MISSING}


async def stack_backend(group: ServedGroup) -> StorageBackend:
    backend = PeerBackend(group.servers[0].address)
    await backend.open()
    return backend
