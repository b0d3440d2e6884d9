"""Speeds, delays and faults of one simulated rank's I/O and progress reports."""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal

from ...coordinator.ballot import Progress, Quiesced, QuiesceExpired, TransferEnded
from ..world.clock import Action, VirtualClock
from ..world.faults import FaultSource, Mishap
from ..world.violated import Record
from .stores import PageSource

LATE_US_MAX = 60_000
"""Maximum extra delay of a progress report, in microseconds of virtual time."""
_SLOW_STORE_FACTOR = 12


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """An object that a fetch reads or a persist writes, and the host page that has its bytes."""

    index: int
    """The page's index in the sequence of all pages of the order."""
    pool: str
    key: bytes
    page: int
    origin: PageSource | None = None
    """The group that the page is read from; None means this rank's own store."""


@dataclass(slots=True)
class OrderWork:
    """The state of one order, kept until no I/O of the order can access memory any more."""

    operation: int
    kind: Literal["lookup", "fetch", "persist", "copy", "serve"]
    timeout_us: int
    slowness: int = 1
    store: PageSource | None = None
    """The store or group that the order reads or writes; None for a copy."""
    touching: int = 0
    """Number of the order's transfers that have begun and may still access memory."""
    cancelled: bool = False
    gave_up_quiet: bool = False
    over: bool = False
    """Whether the order's outcome has been reported."""
    queue: deque[ObjectPage] = field(default_factory=deque[ObjectPage])
    """Pages whose transfers have not started; their slots have been claimed since the order was issued.
    """
    pending: list[bool] = field(default_factory=list[bool])
    """By page index of a fetch: True until the page has landed."""
    reading: list[ObjectPage] = field(default_factory=list[ObjectPage])
    """Pages that are being read from another group; if the order is cancelled, their data is discarded.
    """
    landed: int = 0
    ceiling: int | None = None
    ok: bool = True

    @property
    def is_closed(self) -> bool:
        """Whether the order's store has been closed; store calls that end later have no effect."""
        return self.store is not None and self.store.closed


class Conditions:
    """Speed and faults of one rank's executor; all delays are drawn from the schedule's seed."""

    def __init__(
        self, rank: int, *, clock: VirtualClock, faults: FaultSource, random: Random, find: Record
    ) -> None:
        self.rank = rank
        self.clock = clock
        self.faults = faults
        self.random = random
        self.closed = False
        self.find = find
        """Function that records a violation by this rank, such as an access to a page that no transfer
        may access."""
        self._pace = faults.plan.paces[rank]
        self._reports: list[Progress] = []

    def plan(self, delay_us: int, action: Action) -> None:
        """Run `action` after `delay_us` of virtual time, unless this rank has been closed by then."""
        self.clock.after(delay_us, partial(self._happen, action))

    def _happen(self, action: Action) -> None:
        if not self.closed:
            action()

    def take_reports(self) -> list[Progress]:
        reports = self._reports
        self._reports = []
        return reports

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def say(self, progress: Progress) -> None:
        """Report `progress` to the cache, possibly late and possibly twice."""
        if self.faults.strikes(Mishap.LATE_REPORT):
            self._say_later(progress)
            return
        self._reports.append(progress)
        if self.faults.strikes(Mishap.REPEATED_REPORT):
            self._say_later(progress)

    def _say_later(self, progress: Progress) -> None:
        delay_us = self.random.randrange(1_000, LATE_US_MAX)
        self.plan(delay_us, partial(self._append, progress))

    def _append(self, progress: Progress) -> None:
        self._reports.append(progress)

    def slowness(self) -> int:
        """Draw the factor by which the store slows down one order; usually 1."""
        return _SLOW_STORE_FACTOR if self.faults.strikes(Mishap.SLOW_STORE) else 1

    def duration_us(self, work: OrderWork, spread_us: int) -> int:
        """Draw how long a transfer takes; slow ranks and slow stores multiply the usual duration."""
        usual_us = 300 + self.random.random() ** 2 * spread_us
        pace = 1.0 if self.faults.over else self._pace
        return int(usual_us * pace * work.slowness)

    def plan_hung(self, work: OrderWork, end: Action) -> None:
        """Let a hung transfer complete around its deadline, much later, or never."""
        draw = self.random.random()
        if draw < 0.35:
            self.plan(int(work.timeout_us * self.random.uniform(0.8, 1.5)), end)
        elif draw < 0.75:
            self.plan(work.timeout_us + self.random.randrange(200_000, 1_000_000), end)

    def end(self, work: OrderWork, *, ok: bool) -> None:
        """Report the outcome of a copy or a persist, unless it was reported before."""
        if not work.over:
            work.over = True
            self.say(TransferEnded(work.operation, ok))

    def maybe_quiet(self, work: OrderWork) -> None:
        """Report `Quiesced` if the order was cancelled and none of its transfers accesses memory."""
        if work.cancelled and not work.touching:
            self.say(Quiesced(work.operation))

    def give_up_quiet(self, work: OrderWork) -> None:
        """Report `QuiesceExpired` if transfers of the order still access memory."""
        if work.touching:
            work.gave_up_quiet = True
            self.say(QuiesceExpired(work.operation))
