"""The observer of one rank: derives statistics, log lines and timed events from effects.

Statistics and log lines come from events, which are equal on every rank. Timed events mark the phases
of operations and requests, and are created only if a timeline is given.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from ....coordinator.expectations import Seated
from ....coordinator.operation import Kind, Outcome, Phase
from ...protocol.effects import Effects
from ...protocol.notices import (
    OTHERS_HAVE_IT,
    Finished,
    Hit,
    Lacking,
    Missed,
    MissedTokens,
    NotBegun,
    Notice,
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
from ...replica.operations.agenda import Agenda
from .cache_stats import Counts, ReplicaStats

QUIET_S = 1.0
"""Minimum time between log lines about missing pages; further ones are counted. A lost disk causes
many."""

log = logging.getLogger("lockstep")


class Observer:
    """Reads the effects of every command and verdict, and changes nothing.

    `follow` and `released` are for the engine's thread. Only rank 0 logs missing pages, because all
    ranks see the same events.
    """

    def __init__(self, rank: int, agenda: Agenda, timeline: Timeline | None) -> None:
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
        self._agenda = agenda
        self._timeline = timeline
        self._next_id = agenda.next_id

    def follow(self, effects: Effects) -> None:
        """Record the effects of a command or verdict. Call before executing its orders."""
        if self._timeline is not None:
            self._time(effects, self._timeline)
        if effects.notices:
            self._count(effects.notices)

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

    def _count(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            match notice:
                case Stored():
                    self._stored[notice.tier, notice.cause] += notice.pages
                case Removed():
                    self._removed[notice.tier, notice.cause] += notice.pages
                case Finished():
                    self._operations[_word(notice.kind), _word(notice.outcome)] += 1
                case NotBegun():
                    self._operations[_word(notice.kind), _word(Outcome.NO_ROOM)] += 1
                case Hit():
                    self._admissions += 1
                    self._asked_tokens += notice.tokens
                    self._hits["device"] += notice.device_tokens
                    self._hits["host"] += notice.host_tokens
                    self._hits["peer" if notice.source else "storage"] += notice.storage_tokens
                    if any(notice.missed):
                        for cause, tokens in zip(MissedTokens._fields, notice.missed, strict=True):
                            self._missed_tokens[cause] += tokens
                case Missed():
                    self._missed[notice.why] += notice.pages
                case Lacking():
                    if notice.rank is not None and notice.reason == OTHERS_HAVE_IT:
                        self._lacking[notice.rank] += 1
                    if self._logs:
                        self._log(notice)
                case Quarantined():
                    self._quarantined += 1
                case _:
                    # `StoreChanged` and `Reset` are states, so there is nothing to count.
                    pass

    def _log(self, notice: Lacking) -> None:
        """Log a missing page, or count it for the next log line."""
        now = time.monotonic()
        if now < self._silent_until:
            self._untold += 1
            return
        self._silent_until = now + QUIET_S
        untold, self._untold = self._untold, 0
        log.warning(
            "rank %s lacks page %d of request %.200r (key %s): %s; every rank goes on without it%s",
            notice.rank,
            notice.page,
            notice.request,
            notice.key.hex()[:16],
            notice.reason,
            f" ({untold} more like it since the last line)" if untold else "",
        )

    def _time(self, effects: Effects, tell: Timeline) -> None:
        now = time.monotonic()
        for number in range(self._next_id, self._agenda.next_id):
            operation = self._agenda.in_flight.get(number)
            # An operation that ended within the same command took no time.
            if operation is not None:
                kind, phase = _word(operation.kind), _word(operation.phase)
                request = str(getattr(operation, "request", ""))
                tell(OperationBegan(number, kind, request, phase, now))
        self._next_id = self._agenda.next_id
        for expected in effects.expectations:
            if isinstance(expected, Seated):
                tell(OperationMoved(expected.operation, _word(expected.phase), now))
        for order in effects.orders:
            if isinstance(order, Put):
                tell(OperationMoved(order.operation, _word(Phase.ISSUED), now))
            elif isinstance(order, Cancel):
                tell(OperationMoved(order.operation, _word(Phase.QUIESCE), now))
        for notice in effects.notices:
            if isinstance(notice, Finished):
                kind, outcome = _word(notice.kind), _word(notice.outcome)
                tell(OperationEnded(notice.operation, kind, outcome, now))
            elif isinstance(notice, Quarantined):
                tell(OperationMoved(notice.operation, _word(Phase.QUARANTINED), now))
            elif isinstance(notice, Hit):
                tell(RequestAdmitted(*notice[:5], now))


def _word(of: Kind | Outcome | Phase) -> str:
    return of.word.lower()


def _by_two(counter: Counter[tuple[str, str]]) -> Counts:
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    # The engine's thread may count meanwhile; copying the dict is atomic.
    for (first, second), count in sorted(dict(counter).items()):
        counts[str(first)][str(second)] = count
    return dict(counts)
