"""Pages that a rank keeps unchanged while readers' transfer engines read them."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from queue import Empty

import pytest
from msgspec import structs

from lockstep.errors import StorageError
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_shape import part_table
from lockstep.page_format.page_layout import ShardPlace
from lockstep.ranks.page_server.page_server import HostPageServer, ServerBounds
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.storage_backends.buffers import address_of
from lockstep.storage_backends.peer.transfer_engine import RemotePiece, TransferEngine
from lockstep.storage_backends.peer.wire import (
    Done,
    Forget,
    LocateReply,
    LocateRequest,
    LookupReply,
    Message,
    State,
    encode,
)
from tests.kit.ranks.executor_parts import PATIENCE_S, hashed_keys, plain_pages
from tests.kit.ranks.page_servers import (
    LONG_BOUNDS,
    Connect,
    RawReader,
    ServedGroup,
    objects_of,
    serving,
)
from tests.kit.servers.mooncake_master import needs_mooncake
from tests.kit.servers.ports import free_port
from tests.ranks.page_server.test_page_server import ask, ended

LAYOUT = plain_pages(1 << 20)
KEYS = hashed_keys(4)
IMPATIENT = ServerBounds(quiet_s=0.01, stall_s=PATIENCE_S, greeting_s=PATIENCE_S)

Serve = Callable[..., ServedGroup]


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Return a function that starts a rank with three pages, all of which it serves."""

    def start(bounds: ServerBounds = LONG_BOUNDS, *, by_engine: bool = True) -> ServedGroup:
        group = stack.enter_context(serving(LAYOUT, pages=3, bounds=bounds, by_engine=by_engine))
        group.serve(KEYS[:3])
        return group

    return start


def locate(count: int, number: int = 7) -> LocateRequest:
    """Return a request to locate all parts of the first pages."""
    layout = LAYOUT.shard(0, 1)
    table, held = part_table(layout.shape.parts), bytes(layout.shape.held)
    keys = tuple(key.hex() for key in KEYS[:count])
    return LocateRequest(number, KV_POOL, layout.name, table, held, keys)


def located(reader: RawReader, request: LocateRequest) -> tuple[LocateReply, bytes]:
    reader.send(request)
    message, headers = reader.receive()
    assert isinstance(message, LocateReply)
    return message, headers


def is_served(reader: RawReader, group: ServedGroup) -> bool:
    """Wait until the server has handled all earlier messages; return whether it has the first page."""
    reader.send(ask(group, 1))
    message, _ = reader.receive()
    assert isinstance(message, LookupReply)
    return message.there == b"\1"


def test_an_answer_says_of_each_page_where_it_lies_and_has_its_header(
    serve: Serve, connect: Connect
) -> None:
    group = serve()
    pages = group.objects[0].page_views(KV_POOL, range(3))

    answer, headers = located(connect(group), locate(4))

    assert answer.states == bytes([State.WHOLE] * 3 + [State.ABSENT])
    assert answer.pages == (*map(address_of, pages), 0)
    assert len(headers) == 3 * HEADER_BYTES
    assert group.servers[0].sent() == (3, 3)


def test_what_is_withdrawn_is_quiet_only_when_its_reader_is_done(
    serve: Serve, connect: Connect
) -> None:
    group = serve()
    reader = connect(group)
    located(reader, locate(3))

    quiet = group.withdrawn()
    assert not is_served(reader, group)
    with pytest.raises(Empty):
        quiet.get_nowait()
    reader.send(Done(7))

    assert ended(quiet) == [1]


def test_a_reader_that_hangs_up_holds_nothing_any_more(serve: Serve, connect: Connect) -> None:
    group = serve()
    reader = connect(group)
    located(reader, locate(3))

    quiet = group.withdrawn()
    reader.close()

    assert ended(quiet) == [1]


def test_a_reader_that_is_never_done_is_cut_off_and_said_to_be(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    group = serve(IMPATIENT)
    reader = connect(group)
    located(reader, locate(3))

    assert ended(group.withdrawn()) == [1]
    assert reader.is_hung_up_on()
    assert "it still reads what was withdrawn 0.01 s ago" in caplog.text


def test_what_is_forgotten_before_it_was_answered_is_absent(serve: Serve, connect: Connect) -> None:
    group = serve()
    reader = connect(group)

    messages: list[Message] = [locate(1, number=1), locate(1, number=2), Forget(2)]
    reader.sock.sendall(b"".join(encode(each) for each in messages))
    answers = [reader.receive()[0] for _ in range(2)]

    assert [structs.astuple(each)[:2] for each in answers] == [
        (1, bytes([State.WHOLE])),
        (2, bytes([State.ABSENT])),
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([Done(7)], "a Done out of place"),
        ([locate(1), locate(1)], "under a number that it has not done with"),
        ([locate(1, each) for each in range(66)], "more than 64 things at a time"),
        ([structs.replace(locate(1), held=b"\7")], "it wants parts that cannot be"),
    ],
    ids=["not located", "twice", "too much", "no parts"],
)
def test_a_reader_that_makes_no_sense_is_cut_off(
    serve: Serve,
    connect: Connect,
    messages: list[Message],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = serve()
    reader = connect(group)

    for each in messages:
        reader.send(each)

    assert reader.is_hung_up_on()
    assert message in caplog.text
    assert ended(group.withdrawn()) == [1]


def test_a_rank_without_an_engine_locates_nothing(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    reader = connect(serve(by_engine=False))

    reader.send(locate(1))

    assert reader.is_hung_up_on()
    assert "a LocateRequest out of place" in caplog.text


def test_a_server_that_has_closed_lets_no_engine_read_its_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    needs_mooncake()
    objects = objects_of(LAYOUT, ShardPlace.of(0, 1), pages=1)
    server = HostPageServer(objects, make_engine=lambda host: TransferEngine("tcp", "", host))
    target = server.rank.engine.removeprefix("tcp://")
    with closing(TransferEngine("tcp", "", "127.0.0.1")) as engine:
        room = memoryview(bytearray(64))
        engine.register([room])
        (page,) = objects.page_views(KV_POOL, [0])
        before = engine.read(target, [RemotePiece(address_of(room), address_of(page), 64)])
        assert server.close()
        after = engine.read(target, [RemotePiece(address_of(room), address_of(page), 64)])

    assert (before, after) == (True, False)
    assert caplog.text == ""


def test_an_engine_that_cannot_be_had_leaves_no_port_bound() -> None:
    def fail(host: str) -> TransferEngine:
        raise StorageError(f"there is none at {host}")

    objects, port = objects_of(LAYOUT, ShardPlace.of(0, 1), pages=1), free_port()
    with pytest.raises(StorageError, match=r"there is none at 127\.0\.0\.1"):
        HostPageServer(objects, f"127.0.0.1:{port}", make_engine=fail)

    assert HostPageServer(objects, f"127.0.0.1:{port}").close()
