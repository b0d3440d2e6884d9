"""Who reads a group's events has what the group has, whatever is lost on the way."""

from concurrent.futures import Future

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.disaggregation.control import Control, decode
from lockstep.ranks.disaggregation.event_reader import (
    ASKS_AGAIN_S,
    EventReader,
)
from lockstep.ranks.disaggregation.groups.prefix_index import Hit, PrefixIndex
from lockstep.ranks.disaggregation.refusal import Refusal, Refused
from lockstep.ranks.disaggregation.teller import READERS_MAX, Teller
from lockstep.ranks.disaggregation.telling import (
    EventsTold,
    EventsWanted,
    Milestone,
    Progress,
    RequestsTold,
    RequestsWanted,
    SnapshotTold,
)
from lockstep.ranks.orders import KV_POOL
from lockstep.ranks.replica.notices import Cause, Removed, Stored, Tier

KEYS = [bytes([at]) * 32 for at in range(8)]
LATER_S = ASKS_AGAIN_S + 1


def stored(*keys: bytes) -> Stored:
    return Stored(
        Tier.DEVICE, KV_POOL, len(keys), Cause.COMPUTED, b"root", keys, b"tokn" * len(keys)
    )


class Wire:
    """What a group has sent, by reader; and a reader that gets it, unless it is lost."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Control]] = []
        self.fails: set[str] = set()
        self.asked: list[EventsWanted] = []
        self.index = PrefixIndex()
        self.teller = Teller("g", 3, 16, self.send)
        self.reader = EventReader(self.index, "reader", self.ask)

    def send(self, to: str, data: bytes) -> "Future[int]":
        outcome = Future[int]()
        self.sent.append((to, decode(data)))
        if to in self.fails:
            outcome.set_exception(Refused(Refusal.LATE, "nobody is there"))
        else:
            outcome.set_result(1)
        return outcome

    def ask(self, _to: str, message: Control) -> None:
        assert isinstance(message, EventsWanted)
        self.asked.append(message)

    def answer(self) -> None:
        """Let the group hear what it was asked."""
        for each in self.asked:
            self.teller.wanted(each)
        self.asked.clear()

    def arrive(self, now_s: float) -> None:
        """Let everything that was sent reach the reader."""
        sent, self.sent = self.sent, []
        told = [message for _, message in sent if isinstance(message, EventsTold | SnapshotTold)]
        for message in told:
            self.reader.hear(message, now_s)

    def pages(self) -> int:
        return self.index.hits(KEYS).get("g", Hit(0, 0)).pages


@pytest.fixture
def wire() -> Wire:
    wire = Wire()
    wire.reader.follow("g", "address", 3, 0.0)
    wire.answer()
    return wire


def test_a_reader_has_every_page_as_soon_as_it_is_told(wire: Wire) -> None:
    wire.teller.happened([stored(*KEYS[:2])])
    wire.arrive(0.0)
    assert wire.pages() == 2

    wire.teller.happened([Removed(Tier.DEVICE, KV_POOL, 1, Cause.ROOM, (KEYS[1],))])
    wire.arrive(0.0)
    assert wire.pages() == 1


def test_a_lost_batch_shows_with_the_next_and_is_asked_for(wire: Wire) -> None:
    wire.teller.happened([stored(KEYS[0])])
    wire.arrive(0.0)
    wire.teller.happened([stored(KEYS[1])])
    wire.sent.clear()
    wire.teller.happened([stored(KEYS[2])])

    wire.arrive(LATER_S)
    assert (wire.pages(), [each.first for each in wire.asked]) == (0, [1])

    wire.answer()
    wire.arrive(LATER_S)
    assert wire.pages() == 3


def test_who_is_not_answered_asks_again_but_not_at_once(wire: Wire) -> None:
    wire.reader.ask_again(0.5)
    assert wire.asked == []

    wire.reader.ask_again(LATER_S)
    wire.reader.ask_again(LATER_S + 0.5)
    assert [each.first for each in wire.asked] == [0]


def test_who_comes_late_begins_with_what_there_is(wire: Wire) -> None:
    late = EventReader(index := PrefixIndex(), "late", wire.ask)
    wire.teller.happened([stored(*KEYS[:3])])
    wire.teller.begin_life(9)
    late.follow("g", "address", 9, 0.0)
    wire.sent.clear()

    wire.answer()
    to_late = [message for to, message in wire.sent if to == "late"]
    told = [each for each in to_late if isinstance(each, EventsTold | SnapshotTold)]
    for message in told:
        late.hear(message, 0.0)

    assert index.hits(KEYS) == {"g": Hit(3, 3)}


def test_a_snapshot_in_parts_counts_once_all_parts_are_there(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.ranks.disaggregation.teller._PART_BYTES", 100)
    wire.teller.happened([stored(*KEYS)])
    wire.sent.clear()
    wire.teller.wanted(EventsWanted(reader="reader", life=2, first=0))
    parts = [each for _, each in wire.sent if isinstance(each, SnapshotTold)]

    for part in reversed(parts[1:]):
        wire.reader.hear(part, 0.0)
    before = wire.pages()
    wire.reader.hear(parts[0], 0.0)

    assert len(parts) == 3
    assert (before, wire.pages()) == (0, 8)


def test_parts_of_two_snapshots_make_none_together(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.ranks.disaggregation.teller._PART_BYTES", 100)
    anew = EventsWanted(reader="reader", life=2, first=0)
    wire.teller.happened([stored(*KEYS)])
    wire.sent.clear()
    wire.teller.wanted(anew)
    earlier, wire.sent = wire.sent, []
    wire.teller.happened([Removed(Tier.DEVICE, KV_POOL, 1, Cause.ROOM, (KEYS[2],))])
    wire.teller.happened([stored(b"9" * 32)])
    wire.sent.clear()
    wire.teller.wanted(anew)
    later, wire.sent = wire.sent, [*earlier[:1], *wire.sent[1:]]

    wire.arrive(0.0)
    mixed = wire.pages()
    wire.sent = [*later[:1], *earlier[1:]]
    wire.arrive(0.0)

    assert len(earlier) == len(later) == 3
    assert (mixed, wire.pages()) == (0, 2)


def test_a_group_with_nothing_yet_says_so_and_is_asked_no_more(wire: Wire) -> None:
    wire.arrive(0.0)

    wire.reader.ask_again(LATER_S)

    assert wire.index.standing("g").exact
    assert wire.asked == []


def test_whoever_asks_after_requests_hears_of_each_however_many_have_left(wire: Wire) -> None:
    wire.fails.add("reader")
    for number in range(200):
        wire.teller.progress(f"r{number}", Milestone.DONE, hit_tokens=0, computed_tokens=1)
    wire.fails.clear()
    wire.sent.clear()
    names = tuple(f"r{number}" for number in range(200))

    wire.teller.asked(RequestsWanted(reader="reader", requests=(*names, "s", "t")), {"s"})

    ((_, told),) = wire.sent
    assert isinstance(told, RequestsTold)
    assert [(each.request, each.stage) for each in told.ended] == [(e, "done") for e in names]
    assert (told.here, told.unknown) == (("s",), ("t",))


def test_no_more_ends_are_kept_than_may_be(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.ranks.disaggregation.teller.ENDS_KEPT", 1)
    for name in ("r", "s"):
        wire.teller.progress(name, Milestone.DONE, hit_tokens=0, computed_tokens=1)

    wire.teller.asked(RequestsWanted(reader="reader", requests=("r", "s")), ())

    told = wire.sent[-1][1]
    assert isinstance(told, RequestsTold)
    assert (told.unknown, [each.request for each in told.ended]) == (("r",), ["s"])


def test_a_name_that_has_come_once_more_is_here(wire: Wire) -> None:
    wire.teller.progress("r", Milestone.DONE, hit_tokens=0, computed_tokens=1)

    wire.teller.asked(RequestsWanted(reader="reader", requests=("r",)), {"r"})

    assert wire.sent[-1][1] == RequestsTold(group="g", here=("r",))


def test_what_is_told_of_an_earlier_life_or_of_nobody_changes_nothing(wire: Wire) -> None:
    wire.teller.happened([stored(KEYS[0])])
    wire.reader.follow("g", "address", 4, 0.0)
    wire.arrive(0.0)

    wire.reader.hear(EventsTold(group="x", life=3, sequence=0, payload=b""), 0.0)

    assert wire.pages() == 0


def test_a_group_that_is_forgotten_has_nothing(wire: Wire) -> None:
    wire.teller.happened([stored(KEYS[0])])
    wire.arrive(0.0)

    wire.reader.forget("g")

    assert wire.pages() == 0


def test_how_requests_go_is_told_to_every_reader_with_the_time(wire: Wire) -> None:
    wire.teller.wanted(EventsWanted(reader="other", life=3, first=0))
    wire.sent.clear()

    wire.teller.progress("r", Milestone.COMPUTED, hit_tokens=5, computed_tokens=7)

    assert [to for to, _ in wire.sent] == ["reader", "other"]
    told = wire.sent[0][1]
    assert isinstance(told, Progress)
    assert (told.group, told.request, told.stage) == ("g", "r", "computed")
    assert (told.hit_tokens, told.computed_tokens) == (5, 7)
    assert told.at_us > 1_600_000_000_000_000


def test_a_reader_that_cannot_be_reached_is_told_no_more_until_it_asks(wire: Wire) -> None:
    wire.sent.clear()
    wire.fails.add("reader")
    wire.teller.happened([stored(KEYS[0])])
    wire.teller.happened([stored(KEYS[1])])
    assert len(wire.sent) == 1

    wire.fails.clear()
    wire.teller.wanted(EventsWanted(reader="reader", life=3, first=0))
    wire.arrive(0.0)
    assert wire.pages() == 2


def test_no_more_readers_are_told_than_may_be(wire: Wire) -> None:
    for number in range(READERS_MAX):
        wire.teller.wanted(EventsWanted(reader=f"reader {number}", life=3, first=0))
    wire.sent.clear()

    wire.teller.happened([stored(KEYS[0])])

    assert {to for to, _ in wire.sent} == {f"reader {number}" for number in range(READERS_MAX)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stage": "gone"}, "stage is 'gone', must be one of"),
        ({"request": ""}, "request is empty"),
        ({"at_us": -1}, "at_us is -1"),
    ],
)
def test_progress_that_makes_no_sense_is_refused(fields: dict[str, object], words: str) -> None:
    sound: dict[str, object] = {"group": "g", "request": "r", "stage": "done", "at_us": 1}

    with pytest.raises(UsageError, match=words):
        Progress(**(sound | fields))  # type: ignore[arg-type]


def test_a_part_beyond_the_last_is_refused() -> None:
    with pytest.raises(UsageError, match="part is 2, must be from 0 to parts - 1 = 1"):
        SnapshotTold(group="g", life=1, batches=0, part=2, parts=2, data=b"")
