"""Depth 0 and depth 1 keep the same guarantees, in every order of events.

One prefetch of three pages runs on two ranks. Events are timed in half steps ("sides"), two for each
round: the delay from an order to a rank's report, the time at which rank 0 sees the deadline pass, and
the time of the abort.
"""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import pytest

from lockstep.coordinator.ballot import Answered, Capped, Expired, Landed, Progress, Quiesced
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.ranks.protocol.orders import Cancel, Fetch, LookUp, Order
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn

PAGES = 3
PROMPT = list(range(PAGES * PAGE_TOKENS))
HOST_PAGES = 8
SIDES_MAX = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Times of events, in half steps. Rank 0 can read every page, rank 1 only the first two."""

    answers: tuple[int, int]
    """Delay from the lookup order to each rank's answer."""
    reads: tuple[int, int]
    """Delay from the read order to each rank's report."""
    deadline: int | None
    """Time from the start until the deadline of the operation in flight passes on rank 0, or None."""
    abort: int | None
    """Time from the start until the request is aborted on every rank, or None."""
    quiet: int
    """Delay from the cancel order until rank 1 has no I/O in flight; on rank 0 it is zero."""


class Outcome(NamedTuple):
    """The result of one schedule, equal on every rank."""

    cached: int
    """Number of pages that a match finds in host memory."""
    landed: int
    """Number of pages that landed on every rank."""
    disturbed: bool
    """Whether a deadline passed or an abort was issued."""
    free: int
    """Number of free host pages."""
    ended: int
    """Number of prefetches that ended, with any outcome."""
    fetches: int
    """Number of read orders that no executor has processed."""
    steps: int


class Play:
    """One schedule at one depth, from the prefetch until nothing is in flight."""

    def __init__(self, schedule: Schedule, depth: int) -> None:
        self.schedule = schedule
        self.ranks = RanksInTurn(2, depth=depth, host_pages=HOST_PAGES)
        self.landed = [0, 0]
        self.aborted = False
        self._due: list[list[tuple[int, Progress]]] = [[], []]
        self._side = 0

    def run(self) -> Outcome:
        assert self.ranks.every(lambda cache: cache.prefetch("a", PROMPT))
        halves = [RankCache.open_round, RankCache.close_round]
        if self.ranks.depth:
            halves.reverse()
        while not self.ranks.caches[0].inspection.idle:
            assert self._side < SIDES_MAX, "the prefetch does not end"
            for half in halves:
                self._pass_side(first=half is halves[0])
                for cache in self.ranks.caches:
                    half(cache)
            self.ranks.check()
        cache = self.ranks.caches[0]
        return Outcome(
            cached=cache.match(PROMPT).host_tokens // PAGE_TOKENS,
            landed=min(self.landed),
            disturbed=self.aborted or self.schedule.deadline is not None,
            free=cache.inspection.prefixes.allocator.pools[1][0].free,
            ended=sum(cache.stats().operations["prefetch"].values()),
            fetches=sum(len(executor.given(Fetch)) for executor in self.ranks.executors),
            steps=cache.stats().steps,
        )

    def _pass_side(self, *, first: bool) -> None:
        schedule = self.schedule
        # At depth 0, both half steps run in one call, so the engine acts only before the first.
        engine_has_its_turn = first or self.ranks.depth
        late = schedule.abort is not None and self._side >= schedule.abort
        if late and engine_has_its_turn and not self.aborted:
            self.aborted = True
            self.ranks.every(lambda cache: cache.abort("a"))
        for rank, executor in enumerate(self.ranks.executors):
            orders, executor.orders = executor.orders, []
            for order in orders:
                self._due[rank] += self._reports(rank, order)
            now = [report for at, report in self._due[rank] if at <= self._side]
            self._due[rank] = [each for each in self._due[rank] if each[0] > self._side]
            self.landed[rank] = max(
                [self.landed[rank]] + [each.pages for each in now if isinstance(each, Landed)]
            )
            executor.reports += now
        if self._side == schedule.deadline:
            self.ranks.executors[0].reports.append(Expired(1))
        self._side += 1

    def _reports(self, rank: int, order: Order) -> list[tuple[int, Progress]]:
        schedule, now = self.schedule, self._side
        match order:
            case LookUp(operation=operation):
                return [(now + schedule.answers[rank], Answered(operation, PAGES))]
            case Fetch(operation=operation):
                at = now + schedule.reads[rank]
                if not rank:
                    return [(at, Landed(operation, PAGES))]
                return [(at, Landed(operation, PAGES - 1)), (at, Capped(operation, PAGES - 1))]
            case Cancel(operation=operation):
                return [(now + schedule.quiet * rank, Quiesced(operation))]
            case _:
                return []


def schedules(delays: range, moments: range) -> list[Schedule]:
    return [
        Schedule(answers=(a, b), reads=(c, d), deadline=deadline, abort=abort, quiet=quiet)
        for a, b, c, d in product(delays, repeat=4)
        for deadline in (None, *moments)
        for abort in (None, *moments)
        for quiet in (0, 3)
        # Of schedules with a deadline and an abort, keep only those with at most one half step between
        # the two. In all others, the first of the two alone ends the prefetch.
        if deadline is None or abort is None or abs(deadline - abort) <= 1
    ]


SOME = schedules(range(0, 4, 3), range(1, 9, 2))
ALL = schedules(range(4), range(10))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chosen", [SOME, pytest.param(ALL, marks=pytest.mark.slow)])
def test_whatever_comes_on_whichever_side_of_a_round_the_promises_hold(
    chosen: list[Schedule], depth: int
) -> None:
    """P3, R3, R13: replicas are equal after each step, and consistent and leak-free at the end."""
    played = [(schedule, Play(schedule, depth).run()) for schedule in chosen]

    assert [each for each in played if each[1].cached > each[1].landed] == []
    undisturbed = [each for each in played if not each[1].disturbed]
    assert undisturbed
    assert [each for each in undisturbed if each[1].cached != PAGES - 1] == []
    assert [each for each in played if each[1].free != HOST_PAGES - each[1].cached] == []
    assert [each for each in played if (each[1].ended, each[1].fetches) != (1, 0)] == []


def test_with_io_that_ends_at_once_a_prefetch_takes_one_step_more_in_all() -> None:
    """With instant I/O, depth 1 needs only one step more than depth 0 for a whole prefetch."""
    at_once = Schedule(answers=(0, 0), reads=(0, 0), deadline=None, abort=None, quiet=0)

    steps = [Play(at_once, depth).run().steps for depth in (0, 1)]

    query_transfer_quiesce = 3
    assert steps == [query_transfer_quiesce, query_transfer_quiesce + 1]
