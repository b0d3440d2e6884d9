"""Inboxes: what senders say reaches every rank once, in one order, whatever the network does to it."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgpack
import pytest

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import ConfigError, UsageError
from lockstep.ranks.disaggregation.messages.frames import Kind
from lockstep.ranks.disaggregation.messages.inbox import InboxSettings, OpenInbox, open_inbox
from lockstep.ranks.disaggregation.messages.numbering import SEQUENCE_SPAN, InboxBounds
from lockstep.ranks.disaggregation.messages.sender import MessageSender, SenderSettings
from lockstep.ranks.disaggregation.refusal import Refusal, Refused
from lockstep.ranks.messages import Inbox
from lockstep.storage_backends.host_port import split_address
from tests.kit.disaggregation.inboxes import LIFE, NAME, PATIENCE_S, SECRET, Inboxes, run
from tests.kit.disaggregation.relay import Relay
from tests.kit.ranks.in_turn import RanksInTurn


@pytest.fixture
def sender() -> Iterator[MessageSender]:
    made = MessageSender()
    yield made
    made.close()


def numbers(outcomes: "list[Future[int]]") -> list[int]:
    return [outcome.result(PATIENCE_S) for outcome in outcomes]


def refusal(outcome: "Future[int]") -> Refused:
    error = outcome.exception(PATIENCE_S)
    assert isinstance(error, Refused)
    return error


def kinds(answers: list[int | Refused]) -> list[int | Refusal]:
    return [each.refusal if isinstance(each, Refused) else each for each in answers]


def test_what_several_senders_say_is_in_one_order_on_every_rank() -> None:
    """Rule R14: the order is rank 0's alone, and each sender's own order is kept in it."""
    with Inboxes(3) as inboxes:
        for rank in (1, 2):
            inboxes.follow(rank)
        senders = [MessageSender() for _ in range(3)]
        outcomes = [
            [
                each.send(inboxes.address, b"%d %d" % (at, n), deadline_s=PATIENCE_S)
                for n in range(30)
            ]
            for at, each in enumerate(senders)
        ]
        got = [numbers(each) for each in outcomes]
        first, *others = inboxes.contents(90)
        for each in senders:
            each.close()

    assert others == [first, first]
    assert [sorted(each) for each in got] == got
    assert sorted(first) == sorted(b"%d %d" % (at, n) for at in range(3) for n in range(30))
    assert [[first[number - 1] for number in each] for each in got] == [
        [b"%d %d" % (at, n) for n in range(30)] for at in range(3)
    ]


def test_a_message_that_is_repeated_is_numbered_once() -> None:
    """Rule R13: to say it again, on this connection or another, changes nothing."""
    with Inboxes() as inboxes:
        first = inboxes.say((1, b"one"), (2, b"two"), (1, b"one"))
        again = inboxes.say((2, b"two"), (1, b"other bytes"), (3, b"three"))

        assert (first, again) == ([1, 2, 1], [2, 1, 3])
        assert inboxes.contents(3) == [[b"one", b"two", b"three"]]


def test_messages_that_come_out_of_their_order_are_numbered_as_they_come() -> None:
    with Inboxes() as inboxes:
        assert inboxes.say((3, b"three"), (1, b"one"), (2, b"two"), (3, b"three")) == [1, 2, 3, 1]
        assert inboxes.contents(3) == [[b"three", b"one", b"two"]]


def test_one_that_comes_so_late_that_nobody_knows_whether_it_came_is_refused() -> None:
    """Rule R10: what an inbox remembers of a sender is bounded, and it guesses nothing beyond it."""
    with Inboxes() as inboxes:
        answers = inboxes.say((SEQUENCE_SPAN + 1, b"new"), (2, b"late"), (1, b"too late"))

        assert kinds(answers) == [1, 2, Refusal.FORGOTTEN]


@pytest.mark.parametrize("seed", range(4))
def test_a_sender_whose_connection_is_lost_repeats_what_was_not_answered(
    sender: MessageSender, seed: int
) -> None:
    """Rule R13: however often and wherever it is cut, each message is there once."""
    draw = random.Random(seed)
    contents = [draw.randbytes(draw.randrange(200)) + b" %d" % n for n in range(60)]
    cuts = [draw.randrange(500, 2500) for _ in range(6)]
    with Inboxes() as inboxes, Relay(inboxes.address, cuts) as relay:
        outcomes = [sender.send(relay.address, each, deadline_s=PATIENCE_S) for each in contents]
        got = numbers(outcomes)
        (had,) = inboxes.contents(60)

        assert inboxes.leading.count == 60, f"seed {seed}"
        assert relay.connections >= len(cuts), f"seed {seed}"
    assert [had[number - 1] for number in got] == contents, f"seed {seed}"


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_whose_connection_is_lost_goes_on_from_the_number_that_it_has(seed: int) -> None:
    """Rule R13: what it has is a level, and what comes after it is said again."""
    draw = random.Random(seed)
    contents = [draw.randbytes(draw.randrange(200)) for _ in range(60)]
    cuts = [draw.randrange(500, 2500) for _ in range(6)]
    with Inboxes(2) as inboxes, Relay(inboxes.address, cuts) as relay:
        inboxes.follow(1, relay.address)
        inboxes.say(*enumerate(contents, start=1))

        assert inboxes.contents(60) == [contents, contents], f"seed {seed}"
        assert relay.connections >= len(cuts), f"seed {seed}"


def test_a_rank_that_was_away_for_long_is_told_all_that_it_has_missed() -> None:
    with Inboxes(2) as inboxes, Relay(inboxes.address) as relay:
        inbox = inboxes.follow(1, relay.address)
        inboxes.say((1, b"before"))
        assert inbox.wait(1, PATIENCE_S)
        relay.cut()
        inboxes.say((2, b"meanwhile"), (3, b"after"))

        assert inboxes.contents(3) == [[b"before", b"meanwhile", b"after"]] * 2


def test_inboxes_and_senders_that_are_closed_in_mid_stream_leave_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Inboxes(2) as inboxes:
        inboxes.follow(1)
        sender = MessageSender()
        outcomes = [sender.send(inboxes.address, b"m", deadline_s=PATIENCE_S) for _ in range(50)]
        numbers(outcomes[:1])
        inboxes.leading.close()
    sender.close()

    assert [record.getMessage() for record in caplog.records] == []


BOUNDS = InboxBounds(messages_waiting=2, message_bytes=20, bytes_waiting=30)


def test_an_inbox_that_is_full_refuses_by_name_and_takes_again_when_its_engine_has_taken() -> None:
    """Rule R10: what exceeds the bound is refused, and nothing of what was taken is lost."""
    with Inboxes(bounds=BOUNDS) as inboxes:
        answers = inboxes.say((1, b"a"), (2, b"b"), (3, b"c"))
        assert kinds(answers) == [1, 2, Refusal.FULL]
        assert str(answers[2]) == "2 messages wait, which is as many as may wait"

        inboxes.leading.let_go(1)

        assert kinds(inboxes.say((3, b"c"), (4, b"d"))) == [3, Refusal.FULL]


def test_the_bytes_that_wait_are_bounded_as_well() -> None:
    with Inboxes(bounds=BOUNDS) as inboxes:
        answers = inboxes.say((1, b"a" * 20), (2, b"b" * 11), (3, b"c" * 10))

        assert kinds(answers) == [1, Refusal.FULL, 2]
        assert "20 bytes of messages wait, and with 11 more" in str(answers[1])


def test_a_message_waits_until_every_rank_has_it() -> None:
    """Rule R10: a rank that is away keeps what it lacks from being forgotten, within the bound."""
    with Inboxes(2, bounds=BOUNDS) as inboxes:
        inboxes.say((1, b"a"), (2, b"b"))
        inboxes.leading.let_go(2)
        assert kinds(inboxes.say((3, b"c"))) == [Refusal.FULL]

        inboxes.follow(1)
        sender = MessageSender()
        outcome = sender.send(inboxes.address, b"c", deadline_s=PATIENCE_S)

        assert numbers([outcome]) == [3]
        assert inboxes.following[0].wait(3, PATIENCE_S)
        sender.close()


def test_a_sender_waits_for_room_until_its_time_is_up(sender: MessageSender) -> None:
    with Inboxes(bounds=BOUNDS) as inboxes:
        inboxes.say((1, b"a"), (2, b"b"))
        late = sender.send(inboxes.address, b"c", deadline_s=0.05)
        in_time = sender.send(inboxes.address, b"d", deadline_s=PATIENCE_S)
        refused = refusal(late)
        inboxes.leading.let_go(2)

        assert numbers([in_time]) == [3]
    assert refused.refusal is Refusal.LATE
    assert "was not taken within 0.05 s: 2 messages wait" in str(refused)


@pytest.mark.parametrize("size", [21, 1 << 16])
def test_a_message_that_is_too_large_over_there_is_refused_by_name(
    sender: MessageSender, size: int
) -> None:
    with Inboxes(bounds=BOUNDS) as inboxes:
        large, small = (
            sender.send(inboxes.address, bytes(each), deadline_s=PATIENCE_S) for each in (size, 20)
        )

        assert numbers([small]) == [1]
        assert refusal(large).refusal is Refusal.TOO_LARGE
        assert "must be at most 20 at 127.0.0.1" in str(refusal(large))


def test_a_frame_that_claims_to_be_too_large_ends_its_connection_before_it_is_read() -> None:
    async def claim(inboxes: Inboxes) -> Refused:
        connection = await inboxes.connection()
        await connection.write((1 << 31).to_bytes(4, "big"))
        with pytest.raises(Refused) as raised:
            await connection.receive(Kind.TAKEN)
        connection.abort()
        return raised.value

    with Inboxes(bounds=BOUNDS) as inboxes:
        assert run(claim(inboxes)).refusal is Refusal.TOO_LARGE
        assert inboxes.say((1, b"a")) == [1]


def test_what_exceeds_a_sender_s_own_bounds_is_refused_by_name_at_once() -> None:
    with Inboxes(bounds=BOUNDS) as inboxes:
        inboxes.say((1, b"a"), (2, b"b"))
        sender = MessageSender(SenderSettings(message_bytes=9, messages_waiting=2, addresses=1))
        address = inboxes.address
        waiting = [sender.send(address, b"w", deadline_s=PATIENCE_S) for _ in range(2)]

        outcomes = [
            sender.send(address, bytes(10), deadline_s=PATIENCE_S),
            sender.send(address, b"x", deadline_s=PATIENCE_S),
            sender.send("127.0.0.1:9", b"y", deadline_s=PATIENCE_S),
        ]
        said = [refusal(each).refusal for each in outcomes]
        sender.close()

    assert said == [Refusal.TOO_LARGE, Refusal.FULL, Refusal.FULL]
    assert {refusal(each).refusal for each in waiting} == {Refusal.CLOSED}


def test_a_sender_with_another_secret_is_refused_by_name_and_says_nothing() -> None:
    other = MessageSender(SenderSettings(secret=b"another secret of another group"))
    with Inboxes(secret=SECRET) as inboxes:
        refused = refusal(other.send(inboxes.address, b"m", deadline_s=PATIENCE_S))

        assert (refused.refusal, inboxes.leading.count) == (Refusal.SECRET, 0)
        assert str(refused) == "the other side has another secret; give both the same one"
    other.close()


def test_a_sender_and_an_inbox_with_one_secret_find_each_other() -> None:
    sender = MessageSender(SenderSettings(secret=SECRET))
    with Inboxes(2, secret=SECRET) as inboxes:
        inboxes.follow(1)

        assert numbers([sender.send(inboxes.address, b"m", deadline_s=PATIENCE_S)]) == [1]
        assert inboxes.contents(1) == [[b"m"], [b"m"]]
    sender.close()


def test_a_stranger_that_relays_to_an_inbox_is_refused() -> None:
    sender = MessageSender(SenderSettings(secret=SECRET))
    with Inboxes(secret=SECRET) as inboxes, Relay(inboxes.address) as relay:
        refused = refusal(sender.send(relay.address, b"m", deadline_s=PATIENCE_S))

        assert (refused.refusal, inboxes.leading.count) == (Refusal.SECRET, 0)
        assert f"{relay.address} is not its address" in str(refused)
    sender.close()


def test_a_listener_that_does_not_know_the_secret_is_found_out_before_it_is_told_anything() -> None:
    """Both sides prove themselves: one that only claims to let everybody in hears no message."""
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await reader.readexactly(44)
        writer.write(greeting)
        heard.extend(await reader.readexactly(32))
        writer.write(b"\0" + bytes(32))
        heard.extend(await reader.read())
        writer.close()

    async def listen() -> Refused:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sender = MessageSender(SenderSettings(secret=SECRET))
        outcome = sender.send(address, b"for nobody else", deadline_s=PATIENCE_S)
        with pytest.raises(Refused) as raised:
            await asyncio.wrap_future(outcome)
        await asyncio.to_thread(sender.close)
        server.close()
        return raised.value

    assert run(listen()).refusal is Refusal.SECRET
    assert b"for nobody else" not in heard


def test_a_rank_with_another_secret_does_not_follow() -> None:
    with Inboxes(2, secret=SECRET) as inboxes:
        inboxes.secret = b"another secret of another group"
        other = inboxes.follow(1)

        with pytest.raises(ConfigError, match="refuses rank 1: the other side has another secret"):
            other.require_connected(PATIENCE_S)


@pytest.mark.parametrize(
    ("life", "rank", "had", "why"),
    [
        (b"an earlier start", 1, 0, "rank 1 is of another start of the group"),
        (LIFE, 2, 0, "rank 2 is not one that follows this inbox"),
        (LIFE, 0, 0, "rank 0 is not one that follows this inbox"),
        (LIFE, 1, 5, "rank 1 says that it has 5 messages"),
    ],
)
def test_a_rank_that_cannot_be_one_of_the_group_is_told_so(
    life: bytes, rank: int, had: int, why: str
) -> None:
    async def follow(inboxes: Inboxes) -> Refused:
        connection = await inboxes.connection()
        await connection.send(Kind.FOLLOW, life, rank, had)
        with pytest.raises(Refused) as raised:
            await connection.receive(Kind.MESSAGE)
        connection.abort()
        return raised.value

    with Inboxes(2) as inboxes:
        refused = run(follow(inboxes))

    assert refused.refusal is Refusal.STRANGER
    assert why in str(refused)


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
        reader, writer = await asyncio.open_connection(*split_address(inboxes.address))
        writer.write(said)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    with Inboxes() as inboxes:
        run(speak(inboxes))

        assert inboxes.say((1, b"m")) == [1]


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
    async def strangers(inboxes: Inboxes) -> tuple[list[bytes], list[int | Refused]]:
        opened = [await asyncio.open_connection(*split_address(inboxes.address)) for _ in range(3)]
        greeted = [await first_byte(reader) for reader, _ in opened]
        await end_of(opened[0][0])
        said = await asyncio.to_thread(inboxes.say, (1, b"m"))
        for _, writer in opened:
            writer.transport.abort()
        return greeted, said

    with Inboxes(secret=SECRET, bounds=InboxBounds(connections=1, greetings=2)) as inboxes:
        greeted, said = run(strangers(inboxes))

    assert greeted[1:] == [b"L", b"L"]
    assert said == [1]


@pytest.mark.parametrize(
    "fields",
    [
        (Kind.SEND, NAME, -1, b"m"),
        (Kind.SEND, NAME, "1", b"m"),
        (Kind.SEND, NAME, 1, b"m", 1),
        (Kind.HAVE, 1),
        (99,),
        (),
    ],
    ids=str,
)
def test_a_frame_that_makes_no_sense_ends_its_connection_by_name(
    fields: tuple[int | bytes | str, ...],
) -> None:
    async def speak(inboxes: Inboxes) -> Refused:
        connection = await inboxes.connection()
        packed: bytes = msgpack.packb(list(fields))
        await connection.write(len(packed).to_bytes(4, "big") + packed)
        with pytest.raises(Refused) as raised:
            await connection.receive(Kind.TAKEN)
        connection.abort()
        return raised.value

    with Inboxes() as inboxes:
        assert run(speak(inboxes)).refusal is Refusal.MALFORMED
        assert inboxes.say((1, b"m")) == [1]


def test_a_name_of_a_sender_that_is_none_is_refused() -> None:
    async def speak(inboxes: Inboxes) -> object:
        connection = await inboxes.connection()
        await connection.send(Kind.SEND, b"short", 1, b"m")
        _, fields = await connection.receive(Kind.REFUSED)
        connection.abort()
        return fields

    with Inboxes() as inboxes:
        assert run(speak(inboxes)) == [1, "malformed", "5 bytes and 1 name no message"]


def test_more_connections_than_there_may_be_are_refused_and_come_again() -> None:
    async def crowd(inboxes: Inboxes) -> Refusal:
        held = [await inboxes.connection() for _ in range(2)]
        with pytest.raises(Refused) as raised:
            await inboxes.connection()
        for each in held:
            await each.close()
        return raised.value.refusal

    with Inboxes(bounds=InboxBounds(connections=2)) as inboxes:
        assert run(crowd(inboxes)) is Refusal.FULL
        sender = MessageSender()
        assert numbers([sender.send(inboxes.address, b"m", deadline_s=PATIENCE_S)]) == [1]
        sender.close()


def test_what_nobody_takes_is_late_and_whoever_sends_it_does_not_wait(
    sender: MessageSender,
) -> None:
    """Rule R10: `send` returns at once, and the outcome has a deadline."""
    with Inboxes() as inboxes:
        address = inboxes.address
    outcome = sender.send(address, b"m", deadline_s=0.05)

    assert refusal(outcome).refusal is Refusal.LATE
    assert not outcome.cancel()


def test_a_message_reaches_an_inbox_that_opens_after_it_was_sent(sender: MessageSender) -> None:
    with Inboxes() as inboxes, Relay(inboxes.address) as relay:
        relay.refuse_first(3)
        outcome = sender.send(relay.address, b"m", deadline_s=PATIENCE_S)

        assert numbers([outcome]) == [1]


def test_a_sender_that_is_closed_says_so_of_what_it_has_and_of_what_comes(
    sender: MessageSender,
) -> None:
    with Inboxes() as inboxes:
        address = inboxes.address
    before = sender.send(address, b"m", deadline_s=PATIENCE_S)
    sender.close()
    after = sender.send(address, b"m", deadline_s=PATIENCE_S)

    assert [refusal(each).refusal for each in (before, after)] == [Refusal.CLOSED] * 2


def test_a_line_that_was_idle_ends_and_another_one_goes_on() -> None:
    sender = MessageSender(SenderSettings(idle_s=0.01))
    with Inboxes() as inboxes, Relay(inboxes.address) as relay:
        got = [
            sender.send(relay.address, b"m", deadline_s=PATIENCE_S).result(PATIENCE_S)
            for _ in range(3)
        ]

        assert got == [1, 2, 3]
    sender.close()


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "host:http", "host:70000", "::1:80"]
)
def test_an_address_that_makes_no_sense_is_refused(address: str, sender: MessageSender) -> None:
    with pytest.raises(ConfigError, match=r"write host:port|the port of"):
        sender.send(address, b"m", deadline_s=1.0)


@pytest.mark.parametrize(("address", "host"), [("[::1]:80", "::1"), ("localhost:80", "localhost")])
def test_an_address_is_a_host_and_a_port(address: str, host: str) -> None:
    assert split_address(address) == (host, 80)


@pytest.mark.parametrize("host", ["10.0.0.0", "10.1.2.3", "[::]", "node7"])
def test_without_a_secret_no_message_leaves_or_enters_this_machine(
    host: str, sender: MessageSender
) -> None:
    with pytest.raises(ConfigError, match="messages have no secret"):
        InboxSettings(address=f"{host}:0")
    with pytest.raises(ConfigError, match="messages have no secret"):
        sender.send(f"{host}:80", b"m", deadline_s=1.0)
    assert InboxSettings(address=f"{host}:0", secret=SECRET).address == f"{host}:0"


def test_a_secret_that_can_be_guessed_is_refused_and_none_is_printed() -> None:
    with pytest.raises(ConfigError, match="has 5 bytes, must be 16 or more"):
        InboxSettings(secret=b"12345")
    assert "known" not in repr(InboxSettings(secret=SECRET))


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), 1e9])
def test_a_deadline_is_one(deadline_s: float, sender: MessageSender) -> None:
    with pytest.raises(UsageError, match="deadline_s is"):
        sender.send("127.0.0.1:80", b"m", deadline_s=deadline_s)


def opened(settings: list[InboxSettings]) -> "list[Future[OpenInbox]]":
    """Open the inboxes of a group, each rank in a thread."""
    group = InProcessGroup(len(settings))
    with ThreadPoolExecutor(len(settings)) as threads:
        return [
            threads.submit(open_inbox, each, group.member(rank), PATIENCE_S)
            for rank, each in enumerate(settings)
        ]


def test_a_group_opens_its_inboxes_together_and_every_rank_knows_the_address(
    sender: MessageSender,
) -> None:
    inboxes = [each.result() for each in opened([InboxSettings()] * 3)]
    outcome = sender.send(inboxes[2].address, b"m", deadline_s=PATIENCE_S)

    assert len({each.address for each in inboxes}) == 1
    assert numbers([outcome]) == [1]
    assert [each.wait(1, PATIENCE_S) for each in inboxes] == [True] * 3
    for each in inboxes:
        each.close()


def test_an_inbox_that_cannot_listen_stops_every_rank() -> None:
    with Inboxes() as taken:
        futures = opened([InboxSettings(address=taken.address)] * 2)
        said = {str(each.exception()) for each in futures}

    assert len(said) == 1
    assert "rank 0: rank 0 cannot take messages at 127.0.0.1" in said.pop()


def test_a_rank_that_has_another_secret_stops_every_rank() -> None:
    other = InboxSettings(secret=b"another secret of another group")
    futures = opened([InboxSettings(secret=SECRET), other])

    said = {str(each.exception()) for each in futures}

    assert len(said) == 1
    assert "refuses rank 1: the other side has another secret" in said.pop()


class _OverTheNetwork(RanksInTurn):
    """Ranks whose inboxes are real."""

    real: list[OpenInbox]

    def _inbox(self, rank: int) -> Inbox:
        if not rank:
            self.real = [each.result() for each in opened([InboxSettings()] * 3)]
        return self.real[rank]


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_sender_says_is_a_command_of_all_caches_in_one_step(
    depth: int, sender: MessageSender
) -> None:
    """Rule R14, from a sender's socket to what the engines are told."""
    ranks = _OverTheNetwork(3, depth=depth)
    contents = [b"%d" % number for number in range(20)]
    for content in contents:
        sender.send(ranks.real[0].address, content, deadline_s=PATIENCE_S)
    came: list[bool] = []
    told: list[bytes] = []
    for number in range(1, 21 + depth):
        came += [each.wait(min(number, 20), PATIENCE_S) for each in ranks.real]
        ranks.step()
        told += ranks.every(lambda cache: cache.messages())
    for each in ranks.real:
        each.close()

    assert all(came)
    assert told == contents
