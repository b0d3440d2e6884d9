"""The observer of one rank: derives statistics, log lines and timed events from effects.

Statistics and log lines come from events, which are equal on every rank. Timed events mark the phases
of operations and requests, and are created only if a timeline is given.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from ....coordinator.expectations import SlotAssigned
from ....coordinator.operation import OperationKind, Outcome, Phase
from ...protocol.effects import Effects
from ...protocol.events import (
    OTHERS_HAVE_IT,
    Event,
    Finished,
    Hit,
    Missed,
    MissedTokens,
    MissingOnRank,
    NotBegun,
    Quarantined,
    Removed,
    Stored,
)
from ...protocol.orders import Cancel, Put
from ...protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    OperationMoved,
    RequestAdmitted,
    RequestReleased,
    Timeline,
)
from ...replica.operations.operation_table import OperationTable
from .cache_stats import Counts, ReplicaStats

QUIET_S = 1.0
"""Minimum seconds between two log lines about missing pages. Between them, missing pages are only
counted, because a lost disk causes many."""

log = logging.getLogger("lockstep")


class Observer:
    """Reads the effects of every command and verdict, and changes nothing.

    `follow` and `released` are for the engine's thread. Only rank 0 logs missing pages, because all
    ranks see the same events.
    """

    def __init__(
        self, rank: int, operation_table: OperationTable, timeline: Timeline | None
    ) -> None:
        self._logs = rank == 0
        self._silent_until = 0.0
        self._untold = 0
        self._admissions = self._asked_tokens = self._quarantined = 0
        self._operations = Counter[tuple[str, str]]()
        self._hits = Counter[str]()
        self._missed_tokens = dict.fromkeys(MissedTokens._fields, 0)
        self._missed = Counter[str]()
        self._stored = Counter[tuple[str, str]]()
        self._removed = Counter[tuple[str, str]]()
        self._lacking = Counter[int]()
        self._operation_table = operation_table
        self._timeline = timeline
        self._next_id = operation_table.next_id

    def follow(self, effects: Effects) -> None:
        """Record the effects of a command or verdict.

        Call before the executor gets the orders among these effects.
        """
        if self._timeline is not None:
            self._time(effects, self._timeline)
        if effects.events:
            self._count(effects.events)

    def released(self, request: str) -> None:
        """Record that the engine released a request."""
        if self._timeline is not None:
            self._timeline(RequestReleased(request, time.monotonic()))

    def stats(self) -> ReplicaStats:
        """Return the statistics so far. For any thread."""
        return ReplicaStats(
            operations=_by_two(self._operations),
            admissions=self._admissions,
            asked_tokens=self._asked_tokens,
            hit_tokens=dict(self._hits),
            missed_tokens=dict(self._missed_tokens),
            missed_pages=dict(self._missed),
            stored_pages=_by_two(self._stored),
            removed_pages=_by_two(self._removed),
            lacking=dict(self._lacking),
            quarantined=self._quarantined,
        )

    def _count(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Stored():
                    self._stored[event.tier, event.cause] += event.pages
                case Removed():
                    self._removed[event.tier, event.cause] += event.pages
                case Finished():
                    self._operations[_word(event.kind), _word(event.outcome)] += 1
                case NotBegun():
                    self._operations[_word(event.kind), _word(Outcome.NO_ROOM)] += 1
                case Hit():
                    self._admissions += 1
                    self._asked_tokens += event.tokens
                    self._hits["device"] += event.device_tokens
                    self._hits["host"] += event.host_tokens
                    self._hits["peer" if event.source else "storage"] += event.storage_tokens
                    if any(event.missed):
                        for cause, tokens in zip(MissedTokens._fields, event.missed, strict=True):
                            self._missed_tokens[cause] += tokens
                case Missed():
                    self._missed[event.why] += event.pages
                case MissingOnRank():
                    if event.rank is not None and event.reason == OTHERS_HAVE_IT:
                        self._lacking[event.rank] += 1
                    if self._logs:
                        self._log(event)
                case Quarantined():
                    self._quarantined += 1
                case _:
                    # Count nothing for `StoreChanged` and `Reset`, because they report states rather
                    # than occurrences.
                    pass

    def _log(self, event: MissingOnRank) -> None:
        """Log a missing page, or count it for the next log line."""
        now = time.monotonic()
        if now < self._silent_until:
            self._untold += 1
            return
        self._silent_until = now + QUIET_S
        untold, self._untold = self._untold, 0
        log.warning(
            "rank %s lacks page %d of request %.200r (key %s): %s; every rank continues without it%s",
            event.rank,
            event.page,
            event.request,
            event.key.hex()[:16],
            event.reason,
            f" ({untold} more like it since the last line)" if untold else "",
        )

    def _time(self, effects: Effects, tell: Timeline) -> None:
        now = time.monotonic()
        for number in range(self._next_id, self._operation_table.next_id):
            operation = self._operation_table.in_flight.get(number)
            # Skip an operation that began and ended within one command: it took no time, so it gets no
            # timed events.
            if operation is not None:
                kind, phase = _word(operation.kind), _word(operation.phase)
                request = str(getattr(operation, "request", ""))
                tell(OperationBegan(number, kind, request, phase, now))
        self._next_id = self._operation_table.next_id
        for expected in effects.expectations:
            if isinstance(expected, SlotAssigned):
                tell(OperationMoved(expected.operation, _word(expected.phase), now))
        for order in effects.orders:
            if isinstance(order, Put):
                tell(OperationMoved(order.operation, _word(Phase.ISSUED), now))
            elif isinstance(order, Cancel):
                tell(OperationMoved(order.operation, _word(Phase.QUIESCE), now))
        for event in effects.events:
            if isinstance(event, Finished):
                kind, outcome = _word(event.kind), _word(event.outcome)
                tell(OperationEnded(event.operation, kind, outcome, now))
            elif isinstance(event, Quarantined):
                tell(OperationMoved(event.operation, _word(Phase.QUARANTINED), now))
            elif isinstance(event, Hit):
                tell(RequestAdmitted(*event[:5], now))


def _word(of: OperationKind | Outcome | Phase) -> str:
    return of.word.lower()


def _by_two(counter: Counter[tuple[str, str]]) -> Counts:
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    # Copy the dict, which is atomic, because the engine's thread may change the counter at any time.
    for (first, second), count in sorted(dict(counter).items()):
        counts[str(first)][str(second)] = count
    return dict(counts)
