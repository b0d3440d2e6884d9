"""A rank keeps its last events in bounded memory, and packing and unpacking lose no event."""

import threading

from lockstep.ranks.protocol.orders import Direction
from lockstep.ranks.protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    OperationMoved,
    PagesCopied,
    RequestAdmitted,
    RequestReleased,
    RoundHeld,
    StepHalf,
    StoreCalled,
    TimedEvent,
)
from lockstep.telemetry.kept_events import KeptEvents, RankEvents

ONE_OF_EACH: list[TimedEvent] = [
    StepHalf(1, False, 1.0, 1.5),
    RoundHeld(1, 1.0, 1.1, 1.2),
    OperationBegan(7, "prefetch", "r-1", "query", 1.25),
    OperationMoved(7, "transfer", 1.3),
    OperationEnded(7, "prefetch", "complete", 1.4),
    RequestAdmitted("r-1", 100, 64, 32, 0, 1.5),
    RequestReleased("r-1", 1.6),
    PagesCopied(8, Direction.TO_HOST, 4, 4096, True, 1.7, 1.8),
    StoreCalled("file", "read", 7, "kv", {"ok": 3, "missing": 1}, 3072, 1.9, 2.0),
]


def test_every_kind_of_event_comes_out_as_it_went_in() -> None:
    kept = KeptEvents()
    for each in ONE_OF_EACH:
        kept.note(each)

    packed = kept.of_rank(3).pack()

    assert RankEvents.unpack(packed).events == ONE_OF_EACH
    assert RankEvents.unpack(packed).rank == 3


def test_of_too_many_events_the_oldest_leave_and_are_counted() -> None:
    kept = KeptEvents(events_max=10)
    for number in range(25):
        kept.note(OperationMoved(number, "query", float(number)))

    rank = RankEvents.unpack(kept.of_rank(0).pack())

    assert [each.operation for each in rank.events if isinstance(each, OperationMoved)] == [
        *range(15, 25)
    ]
    assert rank.left_out == 15


def test_events_of_several_threads_are_all_kept() -> None:
    kept = KeptEvents()

    def tell() -> None:
        for number in range(2000):
            kept.note(RequestReleased("r", float(number)))

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len(kept.of_rank(0).events) == 8000
    assert kept.of_rank(0).left_out == 0
