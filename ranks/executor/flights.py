"""The operations in flight on this rank, and their progress.

The engine's thread alone notes here what copies and storage report, and collects it as progress: in
the order of what happened, nothing twice, and nothing after an operation's last report.
"""

import logging
import sys
import time
from dataclasses import dataclass, replace

from ...coordinator.ballot import (
    Answered,
    Capped,
    Ended,
    Expired,
    Landed,
    Progress,
    Quiesced,
    QuiesceExpired,
)
from ...storage_backends.latencies import Latencies
from ..protocol.orders import CopyToDevice, CopyToHost, Direction, Fetch, LookUp, Put, Serve
from ..protocol.timed_events import PagesCopied, Timeline
from .base import BytesMoved
from .copies import CopyEnded
from .deadlines import Deadlines
from .storage_loop import StorageQuiet, StorageReport

Report = StorageReport | CopyEnded
Timed = LookUp | Fetch | Put | CopyToHost | CopyToDevice
"""Orders that have to end in a time."""
Tracked = Timed | Serve

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Flight:
    """An operation that was ordered and that this rank may still have something to say about."""

    order: Tracked
    began: float = 0.0
    pages: int = 0
    """How many pages a fetch is to land."""
    ceiling: int = sys.maxsize
    """How many of them can land, as far as it is known."""
    ended: bool = False
    """Its end or its expiry was reported."""
    quiet: bool = False
    """Nothing touches its pages any more."""
    cancelled: bool = False


class Flights:
    """Keeps each operation from its order to its last report. Used from one thread.

    `lent` says that the device pages are an engine's. Times are on `time.monotonic`'s scale.
    """

    def __init__(self, *, lent: bool, timeline: Timeline | None = None) -> None:
        self._lent = lent
        self._timeline = timeline
        self._flights: dict[int, _Flight] = {}
        self._deadlines = Deadlines()
        self._progress: list[Progress] = []
        self._on_its_way = 0
        """How many of these only say that a fetch has come further."""
        self.moved = BytesMoved()
        """Bytes that operations have moved, as far as they were reported."""
        self.copies = {way: Latencies() for way in Direction}
        """How long copies took, by where to."""
        self.stuck: str | None = None
        """Why this rank cannot recover from an operation that does not end, or None."""

    def __contains__(self, operation: int) -> bool:
        """Say whether there may still be something to report of `operation`."""
        return operation in self._flights

    def has_progress(self) -> bool:
        """Say whether `collect` would return anything."""
        return bool(self._progress)

    def has_news(self) -> bool:
        """Say whether `collect` would return more than that fetches have come further."""
        return len(self._progress) > self._on_its_way

    def collect(self) -> list[Progress]:
        """Return what has happened since the last call, in the order in which it happened."""
        happened, self._progress, self._on_its_way = self._progress, [], 0
        return happened

    def put_off(self, order: Tracked) -> None:
        """Add an operation that does not begin yet: its time runs from `begin` on."""
        self._flights[order.operation] = _Flight(order)

    def keep(self, order: Serve) -> None:
        """Add an operation that has no end but its cancel; it may be there already."""
        self._flights.setdefault(order.operation, _Flight(order))

    def begin(self, order: Timed, now: float) -> None:
        """Begin an operation, new or put off; its time is up `order.timeout_s` after `now`."""
        pages = 0
        if isinstance(order, Fetch):
            pages = sum(len(transfer.keys) for transfer in order.transfers)
        self._flights[order.operation] = _Flight(order, now, pages)
        self._deadlines.put(order.operation, now + order.timeout_s)

    def source_of(self, operation: int) -> str:
        """Return the group that an operation reads from; empty for the store, or for none."""
        flight = self._flights.get(operation)
        order = None if flight is None else flight.order
        return order.source if isinstance(order, LookUp | Fetch) else ""

    def cancel(self, operation: int, deadline: float) -> Tracked | None:
        """Note that `operation` is to fall quiet, by `deadline`; return it unless it is quiet."""
        flight = self._flights.get(operation)
        if flight is None or flight.quiet or isinstance(flight.order, LookUp):
            # A lookup may still run, but it touches no page.
            self._forget(operation)
            self._progress.append(Quiesced(operation))
            return None
        flight.cancelled = True
        self._deadlines.put(operation, deadline)
        return flight.order

    def fail(self, operation: int) -> None:
        """Report an operation in flight as failed, whatever becomes of it."""
        self._note_ended(Ended(operation, ok=False), self._flights[operation])

    def note(self, report: Report) -> None:
        """Note a report, and keep what it adds to the progress."""
        flight = self._flights.get(report.operation)
        match report:
            case CopyEnded():
                self._note_copy(report, flight)
            case StorageQuiet():
                self._note_quiet(report, flight)
            case _ if flight is None:
                pass
            case Answered() if isinstance(flight.order, LookUp):
                self._progress.append(report)
                self._forget(report.operation)
            case Answered():
                pass
            case Ended():
                self._note_ended(report, flight)
            case Landed():
                self._progress.append(report)
                if report.pages < min(flight.pages, flight.ceiling):
                    self._on_its_way += 1
                if report.pages >= flight.pages and not flight.cancelled:
                    self._deadlines.drop(report.operation)
            case Capped():
                flight.ceiling = min(flight.ceiling, report.pages)
                self._progress.append(report)
            case _:
                self._progress.append(report)

    def next_deadline(self) -> float | None:
        """Return when the next operation's time is up, or None."""
        return self._deadlines.next()

    def pass_until(self, now: float) -> None:
        """Report each operation whose time was up by `now`."""
        self._deadlines.pass_until(now, self._passed)

    def _forget(self, operation: int) -> None:
        self._flights.pop(operation, None)
        self._deadlines.drop(operation)

    def _note_copy(self, report: CopyEnded, flight: _Flight | None) -> None:
        moved = self.moved
        if report.direction is Direction.TO_HOST:
            self.moved = replace(moved, l1_to_l2=moved.l1_to_l2 + report.nbytes)
        else:
            self.moved = replace(moved, l2_to_l1=moved.l2_to_l1 + report.nbytes)
        if self._timeline is not None and report.began_s:
            self._timeline(_copied(report, flight))
        if report.reason and not (flight is not None and flight.cancelled):
            _log.error("operation %d: a copy failed: %s", report.operation, report.reason)
        if flight is not None:
            if flight.began:
                self.copies[report.direction].add(time.monotonic() - flight.began)
            self._note_ended(Ended(report.operation, report.ok), flight)
            self._quieten(report.operation, flight)

    def _note_quiet(self, report: StorageQuiet, flight: _Flight | None) -> None:
        moved = self.moved
        self.moved = replace(
            moved,
            l3_to_l2=moved.l3_to_l2 + report.bytes_fetched,
            l2_to_l3=moved.l2_to_l3 + report.bytes_persisted,
        )
        if flight is not None:
            self._quieten(report.operation, flight)

    def _note_ended(self, report: Ended, flight: _Flight) -> None:
        if not flight.ended:
            flight.ended = True
            self._progress.append(report)

    def _quieten(self, operation: int, flight: _Flight) -> None:
        flight.quiet = True
        if flight.cancelled:
            self._progress.append(Quiesced(operation))
        # A fetch that stopped short is not over before its deadline or its cancel (see `Fetch`), but
        # all that can still be said of it is that its time is up.
        if flight.cancelled or flight.ended or not self._can_expire(operation, flight):
            self._forget(operation)

    def _can_expire(self, operation: int, flight: _Flight) -> bool:
        return isinstance(flight.order, Fetch) and self._deadlines.has(operation)

    def _passed(self, operation: int) -> None:
        """Report what it means that the deadline of an operation has passed."""
        flight = self._flights[operation]
        if flight.cancelled:
            self._progress.append(QuiesceExpired(operation))
            if isinstance(flight.order, CopyToDevice) and self._lent:
                # The replica cannot keep pages that are not its own out of use.
                self.stuck = (
                    f"the copy {operation} to the engine's device pages does not end; the device is"
                    " taken for lost"
                )
            return
        if isinstance(flight.order, LookUp | Fetch):
            flight.ended = True
            self._progress.append(Expired(operation))
        else:
            self._note_ended(Ended(operation, ok=False), flight)
        if flight.quiet or isinstance(flight.order, LookUp):
            self._forget(operation)


def _copied(report: CopyEnded, flight: _Flight | None) -> PagesCopied:
    pages = 0
    if flight is not None and isinstance(flight.order, CopyToHost | CopyToDevice):
        pages = sum(len(transfer.sources) for transfer in flight.order.transfers)
    return PagesCopied(
        report.operation,
        report.direction,
        pages,
        report.nbytes,
        report.ok,
        report.began_s,
        report.ended_s,
    )
