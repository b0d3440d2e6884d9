"""Page reads by Mooncake's transfer engine over TCP, and the outcomes of reads that fail."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.page_format.object_header import HEADER_BYTES, encode_object
from lockstep.page_format.object_shape import ObjectShape
from lockstep.ranks.protocol.transfer_engine_settings import TransferEngineSettings
from lockstep.storage_backends.base import ReadOutcome, StorageBackend
from lockstep.storage_backends.peer import one_sided, transfer_engine
from lockstep.storage_backends.peer.backend import PeerBackend
from lockstep.storage_backends.peer.transfer_engine import TransferEngine
from lockstep.storage_backends.peer.wire import (
    Done,
    Hello,
    LocateReply,
    LocateRequest,
    Message,
    PeerRank,
    ReadReply,
    ReadRequest,
    State,
    encode,
)
from tests.kit.programs import program
from tests.kit.ranks.executor_parts import plain_pages
from tests.kit.ranks.page_servers import BY_ENGINE, ServedGroup, pages_of, reads_of, serving_keys
from tests.kit.servers.mooncake_master import needs_mooncake
from tests.kit.servers.processes import stopped_process
from tests.kit.storage.calls import (
    KIB,
    digest_of,
    eventually,
    get,
    now,
    object_name,
    opened_at,
    page,
    reading,
    soon,
    using,
)
from tests.kit.storage.peer_impostors import Impostor, impostor

BYTES = 3 << 19
LAYOUT = plain_pages(BYTES, heads=2)
COUNT = 8
WOULD = TransferEngineSettings()
"""Reader settings that allow a fallback to the socket connection if the transfer engine fails."""
OK = ReadOutcome.OK


@pytest.fixture(autouse=True)
def _mooncake() -> None:
    needs_mooncake()


@contextmanager
def served(**options: object) -> Generator[ServedGroup]:
    """A rank that serves its pages, by default also to transfer engines."""
    with serving_keys(COUNT, LAYOUT, **{"by_engine": True, **options}) as group:
        yield group


async def read_all(
    group: ServedGroup, settings: TransferEngineSettings = BY_ENGINE
) -> list[ReadOutcome]:
    """Read all pages; return the outcomes, after checking the bytes of pages read as OK."""
    async with using(PeerBackend(group.servers[0].address, engine=settings)) as backend:
        reads, buffers = reads_of(group, COUNT)
        outcomes = await backend.read(reads, deadline=soon())
    right = pages_of(group, COUNT)
    assert [at for at in range(COUNT) if outcomes[at] is OK and buffers[at] != right[at]] == []
    return outcomes


class TestWhatMovesPages:
    async def test_who_asks_for_it_in_the_uri_reads_by_the_engine_and_is_sent_nothing(self) -> None:
        with served() as group:
            async with opened_at(f"{group.uri}?transfer=mooncake&insists=1") as backend:
                reads, buffers = reads_of(group, COUNT)
                assert await backend.read(reads, deadline=soon()) == [OK] * COUNT
                assert buffers == pages_of(group, COUNT)
            assert group.servers[0].sent().by_engine == COUNT

    async def test_many_calls_at_once_have_room_of_their_own(self) -> None:
        with served() as group:
            async with using(PeerBackend(group.servers[0].address, engine=BY_ENGINE)) as backend:
                batches = [reads_of(group, COUNT) for _ in range(6)]
                calls = [backend.read(reads, deadline=soon()) for reads, _ in batches]
                assert await asyncio.gather(*calls) == [[OK] * COUNT] * 6
                assert [buffers for _, buffers in batches] == [pages_of(group, COUNT)] * 6

    async def test_a_read_that_is_cancelled_touches_nothing_more_and_the_next_goes_well(
        self,
    ) -> None:
        with served() as group:
            async with using(PeerBackend(group.servers[0].address, engine=BY_ENGINE)) as backend:
                reads, buffers = reads_of(group, COUNT)
                call = asyncio.create_task(backend.read(reads, deadline=soon()))
                await eventually(lambda: located(group))
                call.cancel()
                await asyncio.wait([call])
                before = [bytes(each) for each in buffers]
                others, theirs = reads_of(group, COUNT)
                assert await backend.read(others, deadline=soon()) == [OK] * COUNT
                assert theirs == pages_of(group, COUNT)
                assert [bytes(each) for each in buffers] == before


async def located(group: ServedGroup) -> bool:
    return group.servers[0].sent().by_engine > 0


class TestWhereThereIsNone:
    async def test_a_group_without_one_is_read_over_the_connection_and_one_line_says_why(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with served(by_engine=False) as group:
            assert await read_all(group, WOULD) == [OK] * COUNT

        (line,) = [each.getMessage() for each in caplog.records]
        assert "the other group has no engine; set transfer='mooncake' there as well" in line
        assert line.endswith("; pages come over the connection")

    async def test_a_process_that_cannot_load_it_reads_over_the_connection(
        self, without_mooncake: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with served() as group:
            assert await read_all(group, WOULD) == [OK] * COUNT
            assert group.servers[0].sent().by_engine == 0

        assert "cannot be loaded" in caplog.text
        assert "install mooncake-transfer-engine-non-cuda" in caplog.text

    @pytest.mark.parametrize("by_engine", [True, False])
    async def test_who_insists_is_refused(self, by_engine: bool, without_mooncake: None) -> None:
        with served(by_engine=by_engine) as group:
            backend = PeerBackend(group.servers[0].address, engine=BY_ENGINE)
            with pytest.raises(ConfigError, match="cannot be read by Mooncake's transfer engine: "):
                await backend.open()

    async def test_engines_of_two_protocols_do_not_read_from_each_other(self) -> None:
        with served() as group:
            settings = TransferEngineSettings(protocol="rdma", insists=True)
            backend = PeerBackend(group.servers[0].address, engine=settings)
            with pytest.raises(ConfigError, match="its protocol is tcp there and rdma here"):
                await backend.open()

    def test_rdma_without_a_device_is_refused_though_the_library_would_take_tcp(self) -> None:
        with pytest.raises(StorageError, match="no RDMA device called 'none0' on this host"):
            TransferEngine("rdma", "none0", "127.0.0.1")


@pytest.fixture
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make Mooncake's library impossible to import for readers in this process."""
    with served():
        # Load the library for the serving rank first, because the next lines prevent any import.
        pass
    monkeypatch.setattr(transfer_engine, "_shared", {})
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    return lambda: None


NUMBERS = {object_name(number).key: number for number in range(3)}


class Keeper:
    """A process that keeps pages in memory, and a false rank that announces these pages' addresses."""

    def __init__(self, process: "subprocess.Popen[str]", pages: int) -> None:
        assert process.stdout is not None
        self.process = process
        engine, *places = process.stdout.readline().split()
        assert len(places) == pages
        self.engine, self.places = engine, tuple(map(int, places))
        self.received: list[Message] = []

    async def tell(self, reader: Impostor) -> None:
        """Greet a reader; answer with page locations to a `LocateRequest`, with ABSENT to a read."""
        name = object_name(0)
        rank = PeerRank(reader.address, ((name.pool, name.shard),), self.engine)
        await reader.greet()
        await reader.say(encode(Hello(0, name.namespace, (rank,))))
        while True:
            message = await reader.receive()
            self.received.append(message)
            match message:
                case LocateRequest():
                    numbers = [NUMBERS[key] for key in message.keys]
                    headers = b"".join(map(header_of, numbers))
                    places = tuple(self.places[number] for number in numbers)
                    answer = LocateReply(
                        message.number, bytes([State.WHOLE]) * len(numbers), places
                    )
                    await reader.say(encode(answer, len(headers)) + headers)
                case ReadRequest():
                    states = bytes([State.ABSENT]) * len(message.keys)
                    await reader.say(encode(ReadReply(message.number, 0, states)))
                case _:
                    pass


def header_of(number: int) -> bytes:
    name, shape = object_name(number), ObjectShape.whole(16 * KIB)
    whole = encode_object(name, digest_of(name), [memoryview(page(number))], shape)
    return bytes(whole[:HEADER_BYTES])


@contextmanager
def keeping(pages: int = 3) -> Generator[Keeper]:
    command = program("tests.kit.servers.engine_process", pages)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield Keeper(process, pages)
        process.kill()


@asynccontextmanager
async def reading_from(
    keeper: Keeper, settings: TransferEngineSettings = WOULD
) -> AsyncGenerator[StorageBackend]:
    async with (
        impostor(keeper.tell) as address,
        using(PeerBackend(address, engine=settings)) as backend,
    ):
        yield backend


class TestTheOtherProcess:
    async def test_one_that_stops_costs_a_call_its_deadline_and_touches_nothing_afterwards(
        self,
    ) -> None:
        with keeping() as keeper:
            async with reading_from(keeper) as backend:
                assert await get(backend, object_name(0)) == (OK, page(0))
                buffer = bytearray(16 * KIB)
                with stopped_process(keeper.process.pid):
                    late = await backend.read(
                        [reading(object_name(1), buffer)], deadline=now() + 0.05
                    )
                await eventually(lambda: done_with(keeper, 2))
                assert late == [ReadOutcome.TIMED_OUT]
                assert buffer == bytearray(16 * KIB)
                assert await get(backend, object_name(2)) == (OK, page(2))

    async def test_one_that_dies_in_mid_read_fails_the_read_and_one_line_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with keeping() as keeper:
            async with reading_from(keeper) as backend:
                assert await get(backend, object_name(0)) == (OK, page(0))
                with stopped_process(keeper.process.pid):
                    call = asyncio.create_task(get(backend, object_name(1)))
                    await eventually(lambda: has_requested(keeper, 2))
                    keeper.process.kill()
                    outcome, _ = await call
                again = await get(backend, object_name(1))

        assert outcome is ReadOutcome.FAILED
        # After the failure, the reader requests the page over the connection, and the false rank
        # answers with ABSENT.
        assert again[0] is ReadOutcome.MISSING
        (line,) = [each.getMessage() for each in caplog.records]
        assert "(a read has failed); they come over the connection from now on" in line

    async def test_who_insists_goes_on_asking_an_engine_that_has_died(self) -> None:
        with keeping() as keeper:
            async with reading_from(keeper, BY_ENGINE) as backend:
                keeper.process.kill()
                keeper.process.wait()
                seen = [(await get(backend, object_name(n)))[0] for n in range(3)]

                await eventually(lambda: done_with(keeper, 3))

        assert seen == [ReadOutcome.FAILED] * 3
        assert [type(each) for each in keeper.received] == [LocateRequest, Done] * 3

    async def test_memory_that_has_other_bytes_by_now_is_corrupt(self) -> None:
        with keeping() as keeper:
            keeper.places = keeper.places[1:]
            async with reading_from(keeper) as backend:
                assert (await get(backend, object_name(0)))[0] is ReadOutcome.CORRUPT

    async def test_memory_that_is_not_registered_there_fails_the_read(self) -> None:
        with keeping() as keeper:
            keeper.places = (keeper.places[0] - (1 << 30),)
            async with reading_from(keeper) as backend:
                assert (await get(backend, object_name(0)))[0] is ReadOutcome.FAILED

    async def test_while_every_thread_is_held_a_call_still_ends_at_its_deadline(self) -> None:
        with keeping() as keeper:
            async with reading_from(keeper) as backend:
                assert await get(backend, object_name(0)) == (OK, page(0))
                with stopped_process(keeper.process.pid):
                    late = [
                        await backend.read(
                            [reading(object_name(1), bytearray(16 * KIB))], deadline=now() + 0.05
                        )
                        for _ in range(one_sided.THREADS + 2)
                    ]
                held = [each for each in threading.enumerate() if "lockstep-peer" in each.name]
                assert late == [[ReadOutcome.TIMED_OUT]] * (one_sided.THREADS + 2)
                assert len(held) <= one_sided.THREADS
                await eventually(lambda: done_with(keeper, one_sided.THREADS + 3))
                assert await get(backend, object_name(2)) == (OK, page(2))


async def has_requested(keeper: Keeper, count: int) -> bool:
    return sum(isinstance(each, LocateRequest) for each in keeper.received) >= count


async def done_with(keeper: Keeper, count: int) -> bool:
    """Return whether the reader has reported that it is done with at least `count` answers."""
    return sum(isinstance(each, Done) for each in keeper.received) >= count
