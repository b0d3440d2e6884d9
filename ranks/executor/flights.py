"""The operations in flight on this rank, and their progress.

The engine's thread alone notes here what copies and storage report, and collects it as progress: in
the order of what happened, nothing twice, and nothing after an operation's last report.
"""

import logging
import time
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from ...coordinator.ballot import (
    Answered,
    Expired,
    Landed,
    OperationProgress,
    Progress,
    Quiesced,
    QuiesceExpired,
    TransferEnded,
)
from ...storage_backends.error_log import LoggedError
from ...storage_backends.latencies import Latencies
from ..protocol.orders import CopyToDevice, CopyToHost, Direction, Fetch, LookUp, Put, Serve
from ..protocol.timed_events import PagesCopied, Timeline
from .base import BytesMoved
from .copies import CopyEnded, CopyJob
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
    deadline: float | None = None
    """None if it has none, or if it has passed."""
    seen: OperationProgress = field(default_factory=OperationProgress)
    job: CopyJob | None = None
    """The copy, once it has begun."""
    held: bool = False
    """Whether the copy waits for `begin_held`."""
    cancelled: bool = False


class Flights:
    """Keeps each operation from its order to its last report. Used from one thread.

    `lent` says that the device pages are an engine's. Times are on `time.monotonic`'s scale. Deadlines
    are looked at when progress is asked for, and by no timer, so a store that blocks its event loop, or
    a device that hangs, does not keep one from being seen.
    """

    def __init__(self, *, lent: bool, timeline: Timeline | None = None) -> None:
        self._lent = lent
        self._timeline = timeline
        self._failures = LoggedError(_log)
        self._flights: dict[int, _Flight] = {}
        self._due: list[tuple[float, int]] = []
        """(deadline, operation) as a heap; those that are not the deadline of a flight are skipped."""
        self._held_count = 0
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

    def copies_with(self, job: CopyJob) -> None:
        """Note the job of a copy that has begun, which a cancel reaches."""
        self._flights[job.operation].job = job

    @property
    def has_held_copies(self) -> bool:
        """Say whether copies wait for `begin_held`."""
        return self._held_count > 0

    def hold(self, order: CopyToHost | CopyToDevice) -> None:
        """Add a copy that does not begin yet: its time runs from `begin_held` on."""
        self._flights[order.operation] = _Flight(order, held=True)
        self._held_count += 1

    def begin_held(self, direction: Direction, now: float) -> list[CopyToHost | CopyToDevice]:
        """Begin the copies in a direction that were held, and return them in the order of `hold`."""
        if not self._held_count:
            return []
        held = [flight.order for flight in self._flights.values() if flight.held]
        copies = [order for order in held if isinstance(order, CopyToHost | CopyToDevice)]
        begun = [order for order in copies if order.direction is direction]
        for order in begun:
            self._held_count -= 1
            self.begin(order, now)
        return begun

    def drop_held(self, operation: int) -> None:
        """End a copy that has not begun: the pages that it names are not its own any more."""
        flight = self._flights.get(operation)
        if flight is not None and flight.held:
            self._held_count -= 1
            flight.held = False
            self._end(flight, ok=False)
            self._quieten(flight)

    def keep(self, order: Serve) -> None:
        """Add an operation that has no end but its cancel; it may be there already."""
        self._flights.setdefault(order.operation, _Flight(order))

    def begin(self, order: Timed, now: float) -> None:
        """Begin an operation, new or put off; its time is up `order.timeout_s` after `now`."""
        pages = 0
        if isinstance(order, Fetch):
            pages = sum(len(transfer.keys) for transfer in order.transfers)
        flight = self._flights[order.operation] = _Flight(order, now, pages)
        self._set_deadline(flight, now + order.timeout_s)

    def copying(self) -> tuple[int, ...]:
        """Return the copies that may still touch a page, in the order in which they were ordered."""
        flights = self._flights.items()
        return tuple(n for n, each in flights if isinstance(each.order, CopyToHost | CopyToDevice))

    def source_of(self, operation: int) -> str:
        """Return the group that an operation reads from; empty for the store, or for none."""
        flight = self._flights.get(operation)
        order = None if flight is None else flight.order
        return order.source if isinstance(order, LookUp | Fetch) else ""

    def cancel(self, operation: int, deadline: float) -> Tracked | None:
        """Note that `operation` is to fall quiet, by `deadline`; return it unless it is quiet."""
        flight = self._flights.get(operation)
        if flight is None or flight.seen.quiesced or isinstance(flight.order, LookUp):
            # A lookup may still run, but it touches no page.
            self._flights.pop(operation, None)
            self._progress.append(Quiesced(operation))
            return None
        flight.cancelled = True
        if flight.job is not None:
            flight.job.cancelled = True
        self._set_deadline(flight, deadline)
        return flight.order

    def fail(self, operation: int) -> None:
        """Stop a copy in flight, and report it as failed whatever becomes of it."""
        flight = self._flights[operation]
        if flight.job is not None:
            flight.job.cancelled = True
        self._end(flight, ok=False)

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
                del self._flights[report.operation]
            case Answered():
                pass
            case Landed():
                is_new = self._tell(report, flight)
                if is_new and report.pages < min(flight.pages, flight.seen.ceiling):
                    self._on_its_way += 1
                if report.pages >= flight.pages and not flight.cancelled:
                    flight.deadline = None
            case _:
                self._tell(report, flight)

    def next_deadline(self) -> float | None:
        """Return when the next operation's time is up, or None."""
        due = self._due
        while due:
            deadline, operation = due[0]
            flight = self._flights.get(operation)
            if flight is not None and flight.deadline == deadline:
                return deadline
            heappop(due)
        return None

    def pass_until(self, now: float) -> None:
        """Report each operation whose time was up by `now`."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, operation = heappop(self._due)
            self._passed(self._flights[operation])

    def _set_deadline(self, flight: _Flight, deadline: float) -> None:
        flight.deadline = deadline
        heappush(self._due, (deadline, flight.order.operation))

    def _tell(self, progress: Progress, flight: _Flight) -> bool:
        """Report what was not reported yet; say whether it was not."""
        is_new = flight.seen.raise_to(progress)
        if is_new:
            self._progress.append(progress)
        return is_new

    def _end(self, flight: _Flight, *, ok: bool) -> None:
        self._tell(TransferEnded(flight.order.operation, ok), flight)

    def _note_copy(self, report: CopyEnded, flight: _Flight | None) -> None:
        moved = self.moved
        if report.direction is Direction.TO_HOST:
            self.moved = replace(moved, l1_to_l2=moved.l1_to_l2 + report.nbytes)
        else:
            self.moved = replace(moved, l2_to_l1=moved.l2_to_l1 + report.nbytes)
        if self._timeline is not None and report.began_s:
            self._timeline(_copied(report, flight))
        if report.reason and not (flight is not None and flight.cancelled):
            self._failures.warn("operation %d: a copy failed: %s", report.operation, report.reason)
        if flight is not None:
            if flight.began:
                self.copies[report.direction].add(time.monotonic() - flight.began)
            self._end(flight, ok=report.ok)
            self._quieten(flight)

    def _note_quiet(self, report: StorageQuiet, flight: _Flight | None) -> None:
        moved = self.moved
        self.moved = replace(
            moved,
            l3_to_l2=moved.l3_to_l2 + report.bytes_fetched,
            l2_to_l3=moved.l2_to_l3 + report.bytes_persisted,
        )
        if flight is not None:
            self._quieten(flight)

    def _quieten(self, flight: _Flight) -> None:
        seen, operation = flight.seen, flight.order.operation
        seen.quiesced = True
        if flight.cancelled:
            self._progress.append(Quiesced(operation))
        # A fetch that stopped short is not over before its deadline or its cancel (see `Fetch`), but
        # all that can still be said of it is that its time is up.
        can_expire = isinstance(flight.order, Fetch) and flight.deadline is not None
        if flight.cancelled or seen.expired or not can_expire:
            del self._flights[operation]

    def _passed(self, flight: _Flight) -> None:
        """Report what it means that the deadline of an operation has passed."""
        operation = flight.order.operation
        flight.deadline = None
        if flight.cancelled:
            self._tell(QuiesceExpired(operation), flight)
            if isinstance(flight.order, CopyToDevice) and self._lent:
                # The replica cannot keep pages that are not its own out of use.
                self.stuck = (
                    f"the copy {operation} to the engine's device pages does not end; the device is"
                    " taken for lost"
                )
            return
        if isinstance(flight.order, LookUp | Fetch):
            self._tell(Expired(operation), flight)
        else:
            self._end(flight, ok=False)
        if flight.seen.quiesced or isinstance(flight.order, LookUp):
            del self._flights[operation]


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
