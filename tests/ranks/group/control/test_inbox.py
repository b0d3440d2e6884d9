"""Inboxes: what rank 0's process says reaches every rank once and in one order."""

import asyncio
import contextlib
import random
from concurrent.futures import Future, ThreadPoolExecutor

import msgpack
import pytest

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import ConfigError, MessageError
from lockstep.ranks.group.control.following_inbox import FollowingInbox
from lockstep.ranks.group.control.frames import Kind
from lockstep.ranks.group.control.inbox import OpenInbox, open_inbox
from lockstep.ranks.group.control.leading_inbox import LeadingInbox
from lockstep.ranks.group.control.numbering import InboxBounds
from lockstep.ranks.protocol.host_port import split_address
from tests.kit.ranks.inboxes import PATIENCE_S, SECRET, Inboxes, run
from tests.kit.ranks.relay import Relay


def numbers(outcomes: "list[Future[int]]") -> list[int]:
    return [outcome.result(PATIENCE_S) for outcome in outcomes]


def refusal(outcome: "Future[int]") -> str:
    error = outcome.exception(PATIENCE_S)
    assert isinstance(error, MessageError)
    return str(error)


def test_what_any_thread_of_rank_0_says_is_in_one_order_on_every_rank() -> None:
    """Rule R14: the order is rank 0's alone, and each thread's own order is kept in it."""

    def said(at: int) -> list[int]:
        return numbers(inboxes.submit(*(b"%d %d" % (at, n) for n in range(30))))

    with Inboxes(3, secret=SECRET) as inboxes, ThreadPoolExecutor(3) as threads:
        for rank in (1, 2):
            inboxes.follow(rank)
        got = list(threads.map(said, range(3)))
        first, *others = inboxes.contents(90)

    assert others == [first, first]
    assert [[first[number - 1] for number in each] for each in got] == [
        [b"%d %d" % (at, n) for n in range(30)] for at in range(3)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_whose_connection_is_lost_goes_on_from_the_number_that_it_has(seed: int) -> None:
    """Rule R13: what it has is a level, and what comes after it is said again."""
    draw = random.Random(seed)
    contents = [draw.randbytes(draw.randrange(200)) for _ in range(60)]
    cuts = [draw.randrange(500, 2500) for _ in range(6)]
    with Inboxes(2) as inboxes, Relay(inboxes.leading.address, cuts) as relay:
        inboxes.follow(1, relay.address)
        inboxes.submit(*contents)

        assert inboxes.contents(60) == [contents, contents], f"seed {seed}"
        assert relay.connections > 1, f"seed {seed}"


def test_a_rank_that_was_away_for_long_is_told_all_that_it_has_missed() -> None:
    with Inboxes(2) as inboxes, Relay(inboxes.leading.address) as relay:
        inbox = inboxes.follow(1, relay.address)
        inboxes.submit(b"before")
        assert inbox.wait(1, PATIENCE_S)
        relay.cut()
        inboxes.submit(b"meanwhile", b"after")

        assert inboxes.contents(3) == [[b"before", b"meanwhile", b"after"]] * 2


def test_inboxes_that_are_closed_in_mid_stream_leave_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Inboxes(2) as inboxes:
        inboxes.follow(1)
        numbers(inboxes.submit(*[b"m"] * 50)[:1])
        inboxes.leading.close()

    assert [record.getMessage() for record in caplog.records] == []


BOUNDS = InboxBounds(messages_waiting=2, message_bytes=20, bytes_waiting=30)


def test_an_inbox_that_is_full_refuses_and_takes_again_when_its_engine_has_taken() -> None:
    """Rule R10: what exceeds the bound is refused, and nothing of what was taken is lost."""
    with Inboxes(bounds=BOUNDS) as inboxes:
        *taken, late = inboxes.submit(b"a", b"b", b"c")
        full = refusal(late)
        inboxes.leading.let_go(1)
        again, beyond = inboxes.submit(b"c", b"d")

        assert numbers([*taken, again]) == [1, 2, 3]
        assert {full, refusal(beyond)} == {"2 messages wait, which is as many as may wait"}


def test_the_bytes_of_a_message_and_of_those_that_wait_are_bounded() -> None:
    with Inboxes(bounds=BOUNDS) as inboxes:
        first, large, beyond, second = inboxes.submit(b"a" * 20, b"b" * 21, b"c" * 11, b"d" * 10)

        assert numbers([first, second]) == [1, 2]
        assert refusal(large) == "a message of 21 bytes, must be at most 20"
        assert "20 bytes of messages wait, and with 11 more" in refusal(beyond)


async def refused(inboxes: Inboxes, *said: bytes) -> str:
    """Say something after the handshake; return what it is refused with."""
    connection = await inboxes.connection()
    for each in said:
        await connection.write(each)
    with pytest.raises(MessageError) as raised:
        await connection.receive(Kind.MESSAGE)
    connection.abort()
    return str(raised.value)


def frame(*parts: object) -> bytes:
    packed: bytes = msgpack.packb(parts)
    return len(packed).to_bytes(4, "big") + packed


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((1 << 31).to_bytes(4, "big"), "must be at most"),
        (frame(Kind.FOLLOW, -1, 0), "is negative"),
        (frame(Kind.FOLLOW, "1", 0), "are no frame"),
        (frame(Kind.FOLLOW, 1, 0, 0), "are no frame"),
        (frame(Kind.HAVE, 1), "a HAVE frame out of its turn"),
        (frame(99), "are no frame"),
        (frame(), "are no frame"),
        (frame(Kind.FOLLOW, 2, 0), "rank 2 is not one that follows this inbox"),
        (frame(Kind.FOLLOW, 0, 0), "rank 0 is not one that follows this inbox"),
        (frame(Kind.FOLLOW, 1, 5), "rank 1 says that it has 5 messages"),
    ],
    ids=str,
)
def test_a_frame_that_makes_no_sense_ends_its_connection_and_says_why(
    said: bytes, why: str
) -> None:
    with Inboxes(2, secret=SECRET) as inboxes:
        assert why in run(refused(inboxes, said))
        inboxes.follow(1)
        inboxes.submit(b"m")
        assert inboxes.contents(1) == [[b"m"], [b"m"]]


def test_a_rank_with_another_secret_does_not_follow() -> None:
    with Inboxes(2, secret=SECRET) as inboxes:
        inboxes.secret = b"another secret of another group"
        other = inboxes.follow(1)

        with pytest.raises(ConfigError, match="refuses rank 1: the other side has another secret"):
            other.require_connected(PATIENCE_S)


def test_a_stranger_that_relays_to_an_inbox_is_refused() -> None:
    with Inboxes(2, secret=SECRET) as inboxes, Relay(inboxes.leading.address) as relay:
        other = inboxes.follow(1, relay.address)

        with pytest.raises(ConfigError, match=f"{relay.address} is not its address"):
            other.require_connected(PATIENCE_S)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(64),
        b"LOCKMSGS" + bytes(36),
        bytes(1 << 16),
    ],
)
def test_whoever_says_something_else_is_cut_off_and_nobody_else_is(said: bytes) -> None:
    async def speak(inboxes: Inboxes) -> None:
        reader, writer = await asyncio.open_connection(*split_address(inboxes.leading.address))
        writer.write(said)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    with Inboxes(2) as inboxes:
        run(speak(inboxes))
        inboxes.follow(1).require_connected(PATIENCE_S)


async def first_byte(reader: asyncio.StreamReader) -> bytes:
    """Return the first byte of a greeting, or nothing from whoever hangs up."""
    with contextlib.suppress(ConnectionError):
        return await reader.read(1)
    return b""


async def end_of(reader: asyncio.StreamReader) -> None:
    """Wait until the connection of one who shows nothing is cut off."""
    with contextlib.suppress(ConnectionError):
        await reader.read()


def test_those_who_show_no_secret_are_few_at_a_time_and_keep_nobody_out() -> None:
    async def strangers(inboxes: Inboxes) -> list[bytes]:
        address = split_address(inboxes.leading.address)
        opened = [await asyncio.open_connection(*address) for _ in range(3)]
        greeted = [await first_byte(reader) for reader, _ in opened]
        await end_of(opened[0][0])
        await asyncio.to_thread(inboxes.follow(1).require_connected, PATIENCE_S)
        for _, writer in opened:
            writer.transport.abort()
        return greeted

    with Inboxes(2, secret=SECRET, bounds=InboxBounds(greetings=2)) as inboxes:
        assert run(strangers(inboxes))[1:] == [b"L", b"L"]


def opened(ranks: int, *, host: str = "") -> "list[Future[OpenInbox]]":
    """Open the inboxes of a group, each rank in a thread."""
    group = InProcessGroup(ranks)
    with ThreadPoolExecutor(ranks) as threads:
        return [
            threads.submit(open_inbox, group.member(rank), PATIENCE_S, host=host)
            for rank in range(ranks)
        ]


def test_a_group_opens_its_inboxes_together_on_loopback() -> None:
    leading, *following = [each.result() for each in opened(3)]
    assert isinstance(leading, LeadingInbox)
    number = leading.submit(b"m").result(PATIENCE_S)
    came = [each.wait(1, PATIENCE_S) for each in following]
    for each in (leading, *following):
        each.close()

    assert (number, came, leading.address.partition(":")[0]) == (1, [True, True], "127.0.0.1")
    assert {type(each) for each in following} == {FollowingInbox}


def test_an_inbox_that_cannot_listen_stops_every_rank() -> None:
    # An address for documentation, which no machine has.
    said = {str(each.exception()) for each in opened(2, host="203.0.113.77")}

    assert len(said) == 1
    assert "rank 0: rank 0 cannot take messages at 203.0.113.77:0" in said.pop()
