"""The front of a run goes on whatever it hears, and names the groups that are lost."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from lockstep.errors import ConfigError, PeerLost
from lockstep.launch.serving.front import Due, Front, FrontCounts, Lines
from lockstep.launch.serving.groups import StartedGroup
from lockstep.launch.serving.rank import post
from lockstep.launch.serving.report import make_serve_report
from lockstep.launch.serving.result import GroupResult
from lockstep.launch.serving.settings import ServeSettings, Shape
from lockstep.launch.settings import ReplaySettings
from lockstep.ranks.disaggregation.dispatcher import Terms
from lockstep.ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from lockstep.ranks.disaggregation.messages.leading_inbox import LeadingInbox
from lockstep.ranks.disaggregation.messages.numbering import InboxBounds
from lockstep.ranks.disaggregation.messages.sender import MessageSender
from lockstep.small_engine.request import WorkloadRequest

TERMS = Terms(model_digest=b"m", page_tokens=16, tokens_max=1000)
REQUEST = WorkloadRequest(index=0, prompt_length=20, output_length=2, hash_ids=(1,))


class Ended:
    """A group whose ranks have ended with an error."""

    name = "prefill-0"

    def status(self) -> int | None:
        return 2

    def kill(self) -> None:
        """Nothing of it is left."""

    def timelines(self) -> Sequence[bytes]:
        return ()

    def result(self) -> GroupResult | None:
        return None

    def end(self) -> None:
        """Nothing of it is left."""


@pytest.fixture
def lines() -> Iterator[Lines]:
    with ExitStack() as opened:
        inbox = LeadingInbox(
            "127.0.0.1:0", secret=b"", bounds=InboxBounds(), life=b"l" * 16, world_size=1
        )
        opened.callback(inbox.close)
        sender = MessageSender()
        opened.callback(sender.close)
        yield Lines(inbox, sender)


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
        front_of(lines, [Ended()]).wait_for_groups()


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
