"""The page server: which pages it serves, until when, and to whom, with scripted readers."""

import logging
import socket
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lockstep.errors import ConfigError, InternalError, StorageError, UsageError
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_name import MARK_POOL
from lockstep.page_format.object_shape import part_table
from lockstep.page_format.page_layout import PageLayout, ShardPlace
from lockstep.ranks.page_server.offers import OfferedPage, Offers
from lockstep.ranks.page_server.page_server import HostPageServer, ServerBounds
from lockstep.ranks.page_server.served_pages import ServedPages
from lockstep.ranks.protocol.host_port import split_address
from lockstep.ranks.protocol.orders import KV_POOL, ObjectTransfer
from lockstep.storage_backends.peer.wire import (
    REQUESTS_MAX,
    Forget,
    Hello,
    LookupReply,
    LookupRequest,
    PeerRank,
    ReadReply,
    ReadRequest,
    State,
)
from tests.kit.ranks.executor_parts import PATIENCE_S, hashed_keys, plain_pages
from tests.kit.ranks.page_servers import (
    LONG_BOUNDS,
    Connect,
    RawReader,
    ServedGroup,
    objects_of,
    raw_reader,
    serving,
)

LARGE = plain_pages(24 << 20)
"""Pages larger than socket buffers, so that a send blocks until the reader receives."""
MEDIUM = plain_pages(3 << 19)
"""Pages of which several fit in one frame, but only one fits in the socket's buffers."""
SMALL = plain_pages(64)
KEYS = hashed_keys(4)
SHARED = "a secret"
IMPATIENT = ServerBounds(quiet_s=0.01, stall_s=PATIENCE_S, greeting_s=PATIENCE_S)

Serve = Callable[..., ServedGroup]


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Return a function that starts a rank which serves its first pages, or none."""

    def start(
        layout: PageLayout, bounds: ServerBounds = LONG_BOUNDS, *, pages: int = 3, offers: int = 0
    ) -> ServedGroup:
        group = stack.enter_context(serving(layout, pages=pages, bounds=bounds))
        if offers:
            group.serve(hashed_keys(offers))
        return group

    return start


def fetch(group: ServedGroup, count: int, number: int = 7) -> ReadRequest:
    """Return a request for all parts of the first pages."""
    layout = group.objects[0].pools[KV_POOL].layout
    table, held = part_table(layout.shape.parts), bytes(layout.shape.held)
    keys = tuple(key.hex() for key in KEYS[:count])
    return ReadRequest(number, KV_POOL, layout.name, table, held, keys)


def ask(group: ServedGroup, count: int) -> LookupRequest:
    shard = group.objects[0].pools[KV_POOL].layout.name
    return LookupRequest(3, KV_POOL, shard, tuple(key.hex() for key in KEYS[:count]))


def looked_up(reader: RawReader, question: LookupRequest) -> bytes:
    reader.send(question)
    message, _ = reader.receive()
    assert isinstance(message, LookupReply)
    return message.there


def begin(reader: RawReader, group: ServedGroup, count: int) -> ReadReply:
    reader.send(fetch(group, count))
    message = reader.receive_control()
    assert isinstance(message, ReadReply)
    return message


def ended(quiet: "SimpleQueue[int]") -> list[int]:
    """Wait until the server reports an operation without readers; return all operations reported."""
    first = [quiet.get(timeout=PATIENCE_S)]
    return first + [quiet.get_nowait() for _ in range(quiet.qsize())]


def transfer(keys: tuple[bytes, ...], slots: tuple[int, ...]) -> list[ObjectTransfer]:
    return [ObjectTransfer(KV_POOL, keys, slots)]


class TestOffers:
    def test_only_what_is_offered_can_be_read_and_only_until_it_is_withdrawn(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(SMALL)
        reader = connect(group)

        before = looked_up(reader, ask(group, 3))
        group.serve(KEYS[:2])
        during = looked_up(reader, ask(group, 3))
        assert ended(group.withdrawn()) == [1]
        after = looked_up(reader, ask(group, 3))

        assert (before, during, after) == (b"\0\0\0", b"\1\1\0", b"\0\0\0")

    def test_more_pages_may_be_offered_under_the_same_operation(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(SMALL)
        reader = connect(group)
        for at in range(3):
            group.servers[0].serve(1, transfer(KEYS[at : at + 1], (at,)))

        assert looked_up(reader, ask(group, 3)) == b"\1\1\1"
        assert ended(group.withdrawn()) == [1]
        assert looked_up(reader, ask(group, 3)) == b"\0\0\0"

    def test_the_same_key_in_two_pages_is_read_from_the_one_that_is_still_offered(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(SMALL)
        reader = connect(group)
        group.servers[0].serve(1, transfer(KEYS[:1], (0,)))
        group.servers[0].serve(2, transfer(KEYS[:1], (1,)))
        assert ended(group.withdrawn(1)) == [1]

        reader.send(fetch(group, 1))
        _, attached = reader.receive()

        assert attached[HEADER_BYTES:] == group.objects[0].page_views(KV_POOL, [1])[0]

    def test_a_page_whose_slot_is_written_again_is_not_there_under_its_old_key(
        self, serve: Serve, connect: Connect
    ) -> None:
        """Regression: after a slot was rewritten, its new page was served under the old page's key."""
        group = serve(SMALL)
        reader = connect(group)
        group.serve(KEYS[:2])
        group.objects[0].begin_writes(KV_POOL, [0])
        before = looked_up(reader, ask(group, 2))
        reader.send(fetch(group, 2))
        states = reader.receive_states(2)
        group.servers[0].serve(2, transfer(KEYS[2:3], (0,)))

        assert (before, states) == (b"\0\1", [State.ABSENT, State.WHOLE])
        assert looked_up(reader, ask(group, 3)) == b"\0\1\1"

    def test_a_page_that_is_written_while_it_is_hashed_gets_no_checksums(self) -> None:
        objects = objects_of(SMALL, ShardPlace.of(0, 1), pages=1)
        offers = Offers()
        pages = ServedPages(objects, offers, by_engine=False)
        offers.serve(1, [OfferedPage((KV_POOL, KEYS[0].hex()), *objects.leases(KV_POOL, [0]))])
        layout = objects.pools[KV_POOL].layout
        table, held = part_table(layout.shape.parts), bytes(layout.shape.held)
        begun = pages.begin(ReadRequest(7, KV_POOL, layout.name, table, held, ()), KEYS[0].hex())
        assert begun is not None

        objects.begin_writes(KV_POOL, [0])

        assert begun.header() == bytes(HEADER_BYTES)

    def test_an_order_with_a_page_that_there_is_not_is_refused_where_it_comes_from(
        self, serve: Serve
    ) -> None:
        with pytest.raises(InternalError, match="there are no host pages 9 to 9"):
            serve(SMALL).servers[0].serve(1, transfer(KEYS[:1], (9,)))


class TestWithdrawing:
    def test_after_withdrawal_the_rest_of_what_a_reader_asked_for_is_absent(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(LARGE, offers=3)
        reader = connect(group)
        begin(reader, group, 3)

        quiet = group.withdrawn()
        assert looked_up(connect(group), ask(group, 1)) == b"\0"
        assert quiet.empty(), "a page is quiet while it is being sent"
        reader.receive_attached()

        assert reader.receive_states(2) == [State.ABSENT] * 2
        assert ended(quiet) == [1]

    def test_a_reader_that_hangs_is_cut_off_and_said_to_be(
        self, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = serve(LARGE, IMPATIENT, offers=3)
        reader = connect(group)
        begin(reader, group, 3)

        assert ended(group.withdrawn()) == [1]
        assert reader.is_hung_up_on()
        (message,) = messages(caplog)
        assert "is cut off: it still reads what was withdrawn 0.01 s ago" in message

    def test_who_reads_under_another_operation_is_not_cut_off(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(LARGE, IMPATIENT)
        group.serve(KEYS[:1], operation=1)
        reader = connect(group)
        begin(reader, group, 1)
        group.serve(KEYS[:1], operation=2)

        assert ended(group.withdrawn(2)) == [2]
        reader.receive_attached()
        assert looked_up(reader, ask(group, 1)) == b"\1"

    def test_a_reader_that_takes_nothing_for_long_is_cut_off(
        self, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = serve(LARGE, ServerBounds(stall_s=0.01, quiet_s=PATIENCE_S), offers=3)
        reader = connect(group)
        begin(reader, group, 3)

        assert ended(group.withdrawn()) == [1]
        assert reader.is_hung_up_on()
        assert "it has taken nothing for 0.01 s" in messages(caplog)[0]

    def test_closing_ends_what_is_being_read_and_all_is_quiet(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(LARGE, offers=3)
        reader = connect(group)
        begin(reader, group, 3)

        quiet = group.withdrawn()
        group.close()
        group.close()

        assert ended(quiet) == [1]
        assert reader.is_hung_up_on()
        assert ended(group.withdrawn(2)) == [2]

    def test_what_was_handed_in_to_a_server_that_never_opens_is_quiet_when_it_closes(self) -> None:
        server = HostPageServer(objects_of(SMALL, ShardPlace.of(0, 1), pages=1))
        quiet = SimpleQueue[int]()
        server.serve(1, transfer(KEYS[:1], (0,)))
        server.withdraw(1, quiet.put)

        assert server.close()
        assert server.close()

        assert ended(quiet) == [1]

    def test_whoever_is_told_and_raises_does_not_end_the_server(
        self, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = serve(SMALL)

        def refuse(operation: int) -> None:
            raise StorageError(f"not {operation}")

        group.servers[0].withdraw(5, refuse)
        assert ended(group.withdrawn(6)) == [6]

        assert "nobody could be told that operation 5 is quiet" in messages(caplog)[0]
        assert group.servers[0].trouble() is None


def pages_between_answers(
    reader: RawReader, group: ServedGroup, count: int
) -> tuple[list[bytes], int]:
    """Receive `count` pages, and send a lookup before each receive.

    Return the pages, and the number of lookup replies that arrived meanwhile.
    """
    got: list[bytes] = []
    answers = 0
    while len(got) < count:
        reader.send(ask(group, 1))
        message, attached = reader.receive()
        if isinstance(message, LookupReply):
            answers += 1
            continue
        assert isinstance(message, ReadReply)
        each = len(attached) // len(message.states)
        got += [attached[at + HEADER_BYTES : at + each] for at in range(0, len(attached), each)]
    return got, answers


class TestReaders:
    def test_an_answer_stands_between_two_frames_and_not_among_the_pages_of_one(
        self, serve: Serve, connect: Connect
    ) -> None:
        keys = hashed_keys(60)
        group = serve(MEDIUM, pages=len(keys), offers=len(keys))
        reader = connect(group)
        pages = group.objects[0].page_views(KV_POOL, range(len(keys)))
        wanted = structs.replace(fetch(group, 0), keys=tuple(key.hex() for key in keys))
        reader.send(wanted)
        got, answers = pages_between_answers(reader, group, len(keys))
        assert answers
        assert got == pages

    def test_what_is_forgotten_is_absent_and_what_follows_is_served(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(LARGE, offers=3)
        reader = connect(group)
        begin(reader, group, 3)

        reader.send(Forget(7))
        other_reader = connect(group)
        assert looked_up(other_reader, ask(group, 1)) == b"\1"
        reader.receive_attached()
        assert reader.receive_states(2) == [State.ABSENT] * 2
        reader.send(fetch(group, 1))
        assert reader.receive_states(1) == [State.WHOLE]

    def test_a_reader_of_other_parts_is_sent_the_header_alone(
        self, serve: Serve, connect: Connect
    ) -> None:
        group = serve(SMALL, offers=1)
        reader = connect(group)

        reader.send(structs.replace(fetch(group, 1), table=b"\1" * 5))
        message, attached = reader.receive()

        assert (message, len(attached)) == (ReadReply(7, 0, bytes([State.BARE])), HEADER_BYTES)

    @pytest.mark.parametrize("held", [b"\1", b""])
    def test_a_reader_that_wants_parts_that_there_are_not_is_cut_off(
        self, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture, held: bytes
    ) -> None:
        group = serve(SMALL, offers=1)
        reader = connect(group)

        reader.send(structs.replace(fetch(group, 1), held=held))

        assert reader.is_hung_up_on()
        assert "it wants parts that cannot be" in messages(caplog)[0]

    def test_a_reader_that_asks_for_too_much_at_a_time_is_cut_off(
        self, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = serve(LARGE, offers=3)
        reader = connect(group)

        for number in range(REQUESTS_MAX + 2):
            reader.send(fetch(group, 1, number))

        assert reader.is_hung_up_on()
        assert f"more than {REQUESTS_MAX} things at a time" in messages(caplog)[0]

    @pytest.mark.parametrize("greets", [True, False])
    @given(garbage=st.binary(min_size=1, max_size=200))
    def test_any_garbage_of_a_reader_costs_that_reader_alone(
        self, garbage: bytes, *, greets: bool
    ) -> None:
        with serving(SMALL, pages=1) as group:
            group.serve(KEYS[:1])
            with speaking(group.servers[0].address, greets=greets) as rude:
                rude.sendall(garbage)
                with raw_reader(group.servers[0].address) as other:
                    other.receive()
                    assert looked_up(other, ask(group, 1)) == b"\1"
            assert group.servers[0].trouble() is None

    def test_more_readers_than_there_may_be_are_told_so(
        self, serve: Serve, connect: Connect, stack: ExitStack
    ) -> None:
        group = serve(SMALL, ServerBounds(readers=1))
        connect(group)

        with pytest.raises(StorageError, match="has reached its limit of connections"):
            stack.enter_context(raw_reader(group.servers[0].address))

    def test_those_who_show_no_secret_are_few_at_a_time_and_keep_nobody_out(
        self, serve: Serve, connect: Connect, stack: ExitStack
    ) -> None:
        group = serve(SMALL, ServerBounds(greetings=1, greeting_s=60.0))
        place = split_address(group.servers[0].address)
        first, second = (
            stack.enter_context(socket.create_connection(place, timeout=30.0)) for _ in range(2)
        )

        assert second.recv(1) == b"L"
        # The server closes the first connection when the second one opens; otherwise this read would
        # not end.
        assert first.makefile("rb").read()[:1] in {b"", b"L"}
        connect(group)

    def test_hello_tells_all_ranks_and_what_each_has(self, stack: ExitStack) -> None:
        group = stack.enter_context(serving(SMALL, 1))
        reader = stack.enter_context(raw_reader(group.servers[0].address))

        (rank,) = [server.rank for server in group.servers]
        assert reader.receive()[0] == Hello(0, group.objects[0].namespace, (rank,))
        assert dict(rank.shards) == {
            KV_POOL: "l0-1.h0-1",
            MARK_POOL: group.objects[0].shardings.mark.shard,
        }


class TestBinding:
    @pytest.mark.parametrize(
        ("address", "secret", "message"),
        [
            ("0.0.0.0:0", "", "which other hosts can reach, and there is no secret"),
            ("[::]:0", "", "which other hosts can reach, and there is no secret"),
            ("0.0.0.0:0", SHARED, "say by which host they reach it"),
            ("nowhere", "", "'nowhere' is not an address; write host:port"),
            ("127.0.0.1:99999", "", "must be 0 to 65535"),
            ("host.invalid:0", "", "pages cannot be served at 'host.invalid:0'"),
        ],
    )
    def test_an_address_that_cannot_be_is_refused_by_name(
        self, address: str, secret: str, message: str
    ) -> None:
        objects = objects_of(SMALL, ShardPlace.of(0, 1), pages=1)

        with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
            HostPageServer(objects, address, secret=secret)

    def test_a_port_that_is_taken_is_refused_by_name(self, serve: Serve) -> None:
        group = serve(SMALL)

        with pytest.raises(ConfigError, match="Address already in use; give another address"):
            HostPageServer(group.objects[0], group.servers[0].address)

    def test_a_rank_that_is_not_among_those_that_serve_is_refused(self) -> None:
        server = HostPageServer(objects_of(SMALL, ShardPlace.of(0, 1), pages=1))

        with pytest.raises(UsageError, match="lack this one"):
            server.open([PeerRank("127.0.0.1:1", ())])
        server.close()

    def test_more_ranks_than_a_hello_can_tell_are_refused(self) -> None:
        server = HostPageServer(objects_of(SMALL, ShardPlace.of(0, 1), pages=1))
        others = [PeerRank(f"{'h' * 250}:{port}", ()) for port in range(1200)]

        with pytest.raises(ConfigError, match="1201 ranks cannot serve pages together"):
            server.open([server.rank, *others])
        server.close()


@contextmanager
def speaking(address: str, *, greets: bool) -> Generator[socket.socket]:
    """A connection to the server, with or without a completed handshake."""
    if greets:
        with raw_reader(address) as reader:
            yield reader.sock
    else:
        with socket.create_connection(split_address(address), timeout=PATIENCE_S) as sock:
            yield sock


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
