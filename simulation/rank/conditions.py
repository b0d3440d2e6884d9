"""The conditions under which one simulated rank works: its pace, its faults, and its reports."""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal

from ...coordinator.ballot import Ended, Progress, Quiesced, QuiesceExpired
from ..world.clock import Action, VirtualClock
from ..world.faults import FaultSource, Mishap
from ..world.violated import Record
from .stores import Origin

LATE_US_MAX = 60_000
"""How much later than usual a report may come."""
_SLOW_STORE_FACTOR = 12


@dataclass(frozen=True, slots=True)
class Page:
    """One object of a fetch or persist, and the host page that belongs to it."""

    index: int
    """Its place in the sequence of all pages of the order."""
    pool: str
    key: bytes
    page: int
    origin: Origin | None = None
    """The group that it is read from; None stands for the store in use."""


@dataclass(slots=True)
class OrderWork:
    """The work on one order, until nothing of it touches memory any more."""

    operation: int
    kind: Literal["lookup", "fetch", "persist", "copy", "serve"]
    timeout_us: int
    slowness: int = 1
    store: Origin | None = None
    """The store or group that the order is for; None for a copy."""
    touching: int = 0
    """How many transfers run now, or can no longer be kept from running."""
    cancelled: bool = False
    gave_up_quiet: bool = False
    over: bool = False
    """Whether its outcome was reported."""
    queue: deque[Page] = field(default_factory=deque[Page])
    """Pages whose transfer has not begun; their slots are claimed all the same."""
    pending: list[bool] = field(default_factory=list[bool])
    """For each page of a fetch, by index, whether it has not landed yet."""
    reading: list[Page] = field(default_factory=list[Page])
    """Pages that another group is sending: what still comes after a cancel is thrown away."""
    landed: int = 0
    ceiling: int | None = None
    ok: bool = True

    @property
    def is_closed(self) -> bool:
        """Whether the store of the order was closed, so that a call that hangs comes to nothing."""
        return self.store is not None and self.store.closed


class Conditions:
    """What the executor of one rank works under. All delays are drawn from the schedule's seed."""

    def __init__(
        self, rank: int, *, clock: VirtualClock, faults: FaultSource, random: Random, find: Record
    ) -> None:
        self.rank = rank
        self.clock = clock
        self.faults = faults
        self.random = random
        self.closed = False
        self.find = find
        """Receives the promises that are broken on this rank."""
        self._pace = faults.plan.paces[rank]
        self._reports: list[Progress] = []

    def plan(self, delay_us: int, action: Action) -> None:
        """Let `action` happen after `delay_us`, unless the rank has closed by then."""
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
        """Report `progress`, perhaps late, perhaps twice."""
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
        """Draw by what factor the store is slower than usual for one order."""
        return _SLOW_STORE_FACTOR if self.faults.strikes(Mishap.SLOW_STORE) else 1

    def duration_us(self, work: OrderWork, spread_us: int) -> int:
        """Draw how long a transfer takes: mostly a short time, at times up to `spread_us` or more."""
        usual_us = 300 + self.random.random() ** 2 * spread_us
        pace = 1.0 if self.faults.over else self._pace
        return int(usual_us * pace * work.slowness)

    def plan_hung(self, work: OrderWork, end: Action) -> None:
        """Let a transfer outlive its deadline: by a little, beyond all patience, or for ever."""
        draw = self.random.random()
        if draw < 0.35:
            self.plan(int(work.timeout_us * self.random.uniform(0.8, 1.5)), end)
        elif draw < 0.75:
            self.plan(work.timeout_us + self.random.randrange(200_000, 1_000_000), end)

    def end(self, work: OrderWork, *, ok: bool) -> None:
        """Report how a copy or write has ended, unless that was reported before."""
        if not work.over:
            work.over = True
            self.say(Ended(work.operation, ok))

    def maybe_quiet(self, work: OrderWork) -> None:
        """Report quiet if `work` was cancelled and touches nothing any more."""
        if work.cancelled and not work.touching:
            self.say(Quiesced(work.operation))

    def give_up_quiet(self, work: OrderWork) -> None:
        """Report that quiet has not come in time, if it has not."""
        if work.touching:
            work.gave_up_quiet = True
            self.say(QuiesceExpired(work.operation))
