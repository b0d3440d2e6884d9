"""Working conditions of one simulated rank: its pace, its faults, and its reports."""

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
"""The maximum extra delay of a report."""
_SLOW_STORE_FACTOR = 12


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """One object of a fetch or persist, with its host page."""

    index: int
    """The page's index in the order's page sequence."""
    pool: str
    key: bytes
    page: int
    origin: PageSource | None = None
    """The group that the page is read from; None means the store in use."""


@dataclass(slots=True)
class OrderWork:
    """The work on one order, until none of its I/O can access memory any more."""

    operation: int
    kind: Literal["lookup", "fetch", "persist", "copy", "serve"]
    timeout_us: int
    slowness: int = 1
    store: PageSource | None = None
    """The store or group of the order; None for a copy."""
    touching: int = 0
    """Number of transfers that run or can no longer be prevented."""
    cancelled: bool = False
    gave_up_quiet: bool = False
    over: bool = False
    """Whether the outcome was reported."""
    queue: deque[ObjectPage] = field(default_factory=deque[ObjectPage])
    """Pages whose transfer has not started; their slots are claimed already."""
    pending: list[bool] = field(default_factory=list[bool])
    """By page index of a fetch: whether the page has not landed yet."""
    reading: list[ObjectPage] = field(default_factory=list[ObjectPage])
    """Pages that another group is sending; data that arrives after a cancel is discarded."""
    landed: int = 0
    ceiling: int | None = None
    ok: bool = True

    @property
    def is_closed(self) -> bool:
        """Whether the order's store was closed, so that hung calls have no effect."""
        return self.store is not None and self.store.closed


class Conditions:
    """Conditions of one rank's executor. All delays are drawn from the schedule's seed."""

    def __init__(
        self, rank: int, *, clock: VirtualClock, faults: FaultSource, random: Random, find: Record
    ) -> None:
        self.rank = rank
        self.clock = clock
        self.faults = faults
        self.random = random
        self.closed = False
        self.find = find
        """Receives findings about broken promises on this rank."""
        self._pace = faults.plan.paces[rank]
        self._reports: list[Progress] = []

    def plan(self, delay_us: int, action: Action) -> None:
        """Run `action` after `delay_us`, unless the rank has closed by then."""
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
        """Report `progress`, possibly late, possibly twice."""
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
        """Draw the store's slowdown factor for one order."""
        return _SLOW_STORE_FACTOR if self.faults.strikes(Mishap.SLOW_STORE) else 1

    def duration_us(self, work: OrderWork, spread_us: int) -> int:
        """Draw a transfer's duration: usually short, sometimes up to `spread_us` or more."""
        usual_us = 300 + self.random.random() ** 2 * spread_us
        pace = 1.0 if self.faults.over else self._pace
        return int(usual_us * pace * work.slowness)

    def plan_hung(self, work: OrderWork, end: Action) -> None:
        """Complete a transfer after its deadline: slightly late, very late, or never."""
        draw = self.random.random()
        if draw < 0.35:
            self.plan(int(work.timeout_us * self.random.uniform(0.8, 1.5)), end)
        elif draw < 0.75:
            self.plan(work.timeout_us + self.random.randrange(200_000, 1_000_000), end)

    def end(self, work: OrderWork, *, ok: bool) -> None:
        """Report the outcome of a copy or write, unless it was reported before."""
        if not work.over:
            work.over = True
            self.say(TransferEnded(work.operation, ok))

    def maybe_quiet(self, work: OrderWork) -> None:
        """Report quiesced if `work` was cancelled and no transfer of it is in flight."""
        if work.cancelled and not work.touching:
            self.say(Quiesced(work.operation))

    def give_up_quiet(self, work: OrderWork) -> None:
        """Report that the quiesce deadline passed, if transfers are still in flight."""
        if work.touching:
            work.gave_up_quiet = True
            self.say(QuiesceExpired(work.operation))
