"""The front of a run serves every request whatever is lost, and names the groups that are."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from lockstep.errors import ConfigError, PeerLost
from lockstep.launch.serving.front import Due, Front, Lines
from lockstep.launch.serving.front_counts import FrontCounts
from lockstep.launch.serving.groups import StartedGroup
from lockstep.launch.serving.rank import post
from lockstep.launch.serving.report import make_serve_report
from lockstep.launch.serving.result import GroupResult
from lockstep.launch.serving.settings import ServeSettings, Shape
from lockstep.launch.settings import ReplaySettings
from lockstep.ranks.disaggregation.control import Arrival, Control, decode, encode
from lockstep.ranks.disaggregation.dispatcher import Terms
from lockstep.ranks.disaggregation.groups.directory import Lease, Registration
from lockstep.ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from lockstep.ranks.disaggregation.groups.router import Role
from lockstep.ranks.disaggregation.messages.leading_inbox import LeadingInbox
from lockstep.ranks.disaggregation.messages.numbering import InboxBounds
from lockstep.ranks.disaggregation.messages.sender import MessageSender
from lockstep.ranks.disaggregation.teller import Teller
from lockstep.ranks.disaggregation.telling import EventsWanted, Milestone, Progress, RequestsWanted
from lockstep.small_engine.request import WorkloadRequest

TERMS = Terms(model_digest=b"m", page_tokens=16, tokens_max=1000)
REQUEST = WorkloadRequest(index=0, prompt_length=20, output_length=2, hash_ids=(1,))


class Started:
    """A group as whoever has started it sees it."""

    def __init__(self, name: str, status: int | None = None) -> None:
        self.name = name
        self._status = status

    def status(self) -> int | None:
        return self._status

    def kill(self) -> None:
        """Nothing of it is to be killed."""

    def timelines(self) -> Sequence[bytes]:
        return ()

    def result(self) -> GroupResult | None:
        return None

    def end(self) -> None:
        """Nothing of it is left."""


def inbox() -> LeadingInbox:
    return LeadingInbox(
        "127.0.0.1:0", secret=b"", bounds=InboxBounds(), life=b"l" * 16, world_size=1
    )


class Played:
    """What a front sees of a group: an inbox, a place in the directory, and what it tells."""

    def __init__(self, lines: Lines, directory: EmbeddedDirectory, registration: Registration):
        self.inbox = inbox()
        addresses = {"messages": self.inbox.address}
        self.registration = replace(registration, addresses=addresses)
        self.teller = Teller(registration.name, 1, 16, self._send)
        self._directory = directory
        self._lines = lines
        self._read = 0
        self.lease = self.register()

    def register(self) -> Lease:
        return self._directory.register(self.registration, 600.0)

    def next(self, kind: type[Control]) -> Control:
        """Return the next message of a kind."""
        while True:
            self._read += 1
            self.inbox.wait(self._read, 20.0)
            message = decode(self.inbox.read(self._read))
            if isinstance(message, kind):
                return message

    def arrival(self) -> str:
        """Return the name of the next request that comes."""
        message = self.next(Arrival)
        assert isinstance(message, Arrival)
        return message.request

    def tell(self, request: str, stage: Milestone, at_us: int = 1) -> None:
        """Tell the front how a request goes, and wait until it has been told."""
        name = self.registration.name
        told = Progress(group=name, request=request, stage=stage.value, at_us=at_us)
        self._send(self._lines.inbox.address, encode(told)).result(10)

    def answer(self, here: set[str]) -> None:
        """Answer the next question after requests."""
        question = self.next(RequestsWanted)
        assert isinstance(question, RequestsWanted)
        self.teller.asked(question, here)

    def _send(self, to: str, data: bytes) -> "Future[int]":
        return self._lines.sender.send(to, data, deadline_s=10)


Join = Callable[[Registration], Played]
PREFILL = Registration(name="prefill-0", role=Role.PREFILL)
DECODE = Registration(name="decode-0", role=Role.DECODE)


@pytest.fixture
def directory() -> Generator[EmbeddedDirectory]:
    directory = EmbeddedDirectory()
    directory.open()
    yield directory
    directory.close()


@pytest.fixture
def join(lines: Lines, directory: EmbeddedDirectory) -> Generator[Join]:
    """What lets a group be listed, which the test plays."""
    with ExitStack() as opened:

        def joined(registration: Registration) -> Played:
            played = Played(lines, directory, registration)
            opened.callback(played.inbox.close)
            return played

        yield joined


@pytest.fixture
def asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be asked after as soon as they are sent, and as long as nobody answers."""
    monkeypatch.setattr("lockstep.ranks.disaggregation.inquiries.ASKS_AFTER_S", 0.0)
    monkeypatch.setattr("lockstep.ranks.disaggregation.inquiries.ASKS_MAX", 1000)


@contextmanager
def serving(
    lines: Lines, directory: EmbeddedDirectory, *names: str
) -> Generator[tuple[Front, "Future[None]"]]:
    """Let a front serve one request by these groups; yield it, and what ends when it has."""
    groups: list[StartedGroup] = [Started(name) for name in names]
    front = Front(groups, directory, TERMS, lines, concurrency=4, outputs_max=0)
    front.wait_for_groups()
    with ThreadPoolExecutor(1) as one:
        yield front, one.submit(front.serve, [Due(0.0, REQUEST)], lambda left: None)


def wait_until_lost(front: Front, directory: EmbeddedDirectory, name: str) -> None:
    while name not in front.counts.lost:
        directory.groups()


@pytest.fixture
def lines() -> Iterator[Lines]:
    with ExitStack() as opened:
        own = inbox()
        opened.callback(own.close)
        sender = MessageSender()
        opened.callback(sender.close)
        yield Lines(own, sender)


def front_of(lines: Lines, groups: list[StartedGroup]) -> Front:
    directory = EmbeddedDirectory()
    directory.open()
    return Front(groups, directory, TERMS, lines, concurrency=4, outputs_max=0)


def test_bytes_that_are_no_message_do_not_end_the_front(lines: Lines) -> None:
    lines.sender.send(lines.inbox.address, b"hello", deadline_s=10).result(10)
    front = front_of(lines, [])

    with pytest.raises(PeerLost, match="no healthy group decodes; lost: none"):
        front.serve([Due(0.0, REQUEST)], lambda left: None)


def test_a_group_that_ends_before_it_is_listed_is_named(lines: Lines) -> None:
    with pytest.raises(PeerLost, match="not all groups have started: prefill-0"):
        front_of(lines, [Started("prefill-0", 2)]).wait_for_groups()


@pytest.mark.parametrize("to", ["nowhere", "10.1.2.3:7", "host:99999"])
def test_nothing_is_sent_to_an_address_that_cannot_be_and_nobody_ends_for_it(
    lines: Lines, to: str
) -> None:
    assert isinstance(post(lines.sender, to, b"hello", 1.0).exception(0), ConfigError)


def test_a_report_does_not_show_the_password_of_a_directory() -> None:
    settings = ServeSettings(
        replay=ReplaySettings(device_pages=64, host_pages=64),
        prefill=Shape(1, 1),
        decode=Shape(1, 1),
        directory="redis://:hidden@host:6379/0",
    )

    report = make_serve_report(settings, FrontCounts(), {}, 1.0)

    assert report["settings"]["directory"] == "redis://***@host:6379/0"


@pytest.mark.usefixtures("asks_at_once")
def test_a_request_ends_though_nobody_was_told_that_it_did(
    lines: Lines, directory: EmbeddedDirectory, join: Join
) -> None:
    group = join(DECODE)
    with serving(lines, directory, "decode-0") as (front, served):
        name = group.arrival()
        # The group knows of no reader yet, so nobody is told.
        group.teller.progress(name, Milestone.DONE, hit_tokens=0, computed_tokens=20)
        group.answer(here=set())
        served.result(10)

    assert (front.counts.served, front.counts.sent_again) == (1, 0)


@pytest.mark.usefixtures("asks_at_once")
def test_a_request_of_which_its_group_knows_nothing_is_sent_again(
    lines: Lines, directory: EmbeddedDirectory, join: Join
) -> None:
    group = join(DECODE)
    with serving(lines, directory, "decode-0") as (front, served):
        first = group.arrival()
        group.answer(here={first})
        group.answer(here=set())
        second = group.arrival()
        group.tell(second, Milestone.DONE)
        served.result(10)

    assert (first, second) == ("request-0", "request-0~2")
    assert (front.counts.served, front.counts.sent_again) == (1, 1)


@pytest.mark.usefixtures("asks_at_once")
def test_a_request_that_no_group_comes_to_the_end_of_is_refused(
    lines: Lines, directory: EmbeddedDirectory, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.serving.front.ATTEMPTS_MAX", 1)
    group = join(DECODE)
    with serving(lines, directory, "decode-0") as (front, served):
        group.arrival()
        group.answer(here=set())
        served.result(10)

    assert front.counts.refusals == [
        "request-0 of 20 tokens was sent 1 times, and no group came to its end"
    ]


def test_requests_of_a_group_that_was_started_anew_under_its_name_begin_anew(
    lines: Lines, directory: EmbeddedDirectory, join: Join
) -> None:
    first = join(DECODE)
    with serving(lines, directory, "decode-0") as (front, served):
        first.arrival()
        second = join(replace(DECODE, start="another"))
        name = second.arrival()
        second.tell(name, Milestone.DONE)
        served.result(10)

    assert (name, front.counts.lost) == ("request-0~2", ["decode-0"])


def test_a_group_that_is_listed_anew_keeps_its_requests(
    lines: Lines, directory: EmbeddedDirectory, join: Join
) -> None:
    group = join(DECODE)
    with serving(lines, directory, "decode-0") as (front, served):
        name = group.arrival()
        directory.leave(group.lease)
        group.register()
        # The front asks for the events of the life that it has seen begin.
        group.next(EventsWanted)
        group.tell(name, Milestone.DONE)
        served.result(10)

    assert (front.counts.lost, front.counts.sent_again) == ([], 0)


def test_requests_wait_for_a_group_that_decodes_to_be_listed_again(
    lines: Lines, directory: EmbeddedDirectory, join: Join
) -> None:
    join(PREFILL)
    group = join(DECODE)
    with serving(lines, directory, "prefill-0", "decode-0") as (front, served):
        group.arrival()
        directory.leave(group.lease)
        wait_until_lost(front, directory, "decode-0")
        group.register()
        name = group.arrival()
        group.tell(name, Milestone.DONE)
        served.result(10)

    assert (name, front.counts.served, front.counts.lost) == ("request-0~2", 1, ["decode-0"])


def test_requests_do_not_wait_for_ever_for_a_group_that_decodes(
    lines: Lines, directory: EmbeddedDirectory
) -> None:
    groups: list[StartedGroup] = [Started("decode-0")]
    front = Front(groups, directory, TERMS, lines, concurrency=4, outputs_max=0, patience_s=0.01)

    with pytest.raises(PeerLost, match="no healthy group decodes"):
        front.serve([Due(0.0, REQUEST)], lambda left: None)


def test_requests_do_not_wait_where_every_group_that_decodes_has_ended(
    lines: Lines, directory: EmbeddedDirectory, join: Join
) -> None:
    join(PREFILL)
    groups: list[StartedGroup] = [Started("prefill-0"), Started("decode-0", -9)]
    front = Front(groups, directory, TERMS, lines, concurrency=4, outputs_max=0, patience_s=3600.0)

    with pytest.raises(PeerLost, match="no healthy group decodes; lost: decode-0"):
        front.serve([Due(0.0, REQUEST)], lambda left: None)


def test_a_handoff_is_timed_whichever_group_is_heard_first(
    lines: Lines, directory: EmbeddedDirectory, join: Join
) -> None:
    prefill, group = join(PREFILL), join(DECODE)
    with serving(lines, directory, "prefill-0", "decode-0") as (front, served):
        name = prefill.arrival()
        group.tell(name, Milestone.READY, at_us=12)
        prefill.tell(name, Milestone.COMPUTED, at_us=5)
        group.tell(name, Milestone.DONE)
        served.result(10)

    assert front.counts.handoffs_us == [7]
