"""Depth 0 and depth 1 keep the same promises, in every order in which things can happen.

One prefetch of three pages on two ranks. Each schedule says how many sides of rounds pass between an
order and what a rank reports of it, when rank 0 sees the deadline pass, and when the request is
aborted. A round has two sides in each step: before its first half, and between its halves.
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
"""Far more than any schedule takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When things happen, in sides of rounds. Rank 0 can read every page, rank 1 the first two."""

    answers: tuple[int, int]
    """From the order to look up to each rank's answer."""
    reads: tuple[int, int]
    """From the order to read to each rank's report."""
    deadline: int | None
    """From the start until rank 0 sees the deadline of what is in flight pass."""
    abort: int | None
    """From the start until the request is aborted, on every rank."""
    quiet: int
    """From the order to cancel until rank 1 is quiet; rank 0 is at once."""


class Outcome(NamedTuple):
    """What a schedule came to, on every rank."""

    cached: int
    """Pages that a match finds on the host."""
    landed: int
    """Pages that have landed on every rank."""
    disturbed: bool
    """Whether a deadline or an abort came."""
    free: int
    """Host pages."""
    ended: int
    """Prefetches that have ended, in whatever way."""
    fetches: int
    """Orders that nobody has taken."""
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
        """Play the schedule, and check the replicas after every step."""
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
            free=cache.inspection.prefixes.residence.pools[1][0].free,
            ended=sum(cache.stats().operations["prefetch"].values()),
            fetches=sum(len(executor.given(Fetch)) for executor in self.ranks.executors),
            steps=cache.stats().steps,
        )

    def _pass_side(self, *, first: bool) -> None:
        schedule = self.schedule
        # At depth 0 both halves are one call of the engine, so nothing comes between them.
        engine_has_its_turn = first or self.ranks.depth
        late = schedule.abort is not None and self._side >= schedule.abort
        if late and engine_has_its_turn and not self.aborted:
            self.aborted = True
            self.ranks.every(lambda cache: cache.abort("a"))
        for rank, executor in enumerate(self.ranks.executors):
            orders, executor.orders = executor.orders, []
            for order in orders:
                self._due[rank] += self._reports(rank, order)
            now = [said for at, said in self._due[rank] if at <= self._side]
            self._due[rank] = [each for each in self._due[rank] if each[0] > self._side]
            self.landed[rank] = max(
                [self.landed[rank]] + [each.pages for each in now if isinstance(each, Landed)]
            )
            executor.said += now
        if self._side == schedule.deadline:
            self.ranks.executors[0].said.append(Expired(1))
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
        # What comes after the other has ended the prefetch is another schedule's business.
        if deadline is None or abort is None or abs(deadline - abort) <= 1
    ]


SOME = schedules(range(0, 4, 3), range(1, 9, 2))
ALL = schedules(range(4), range(10))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chosen", [SOME, pytest.param(ALL, marks=pytest.mark.slow)])
def test_whatever_comes_on_whichever_side_of_a_round_the_promises_hold(
    chosen: list[Schedule], depth: int
) -> None:
    """P3, R3, R13: the replicas are equal after each step, and whole and empty at the end."""
    played = [(schedule, Play(schedule, depth).run()) for schedule in chosen]

    assert [each for each in played if each[1].cached > each[1].landed] == []
    undisturbed = [each for each in played if not each[1].disturbed]
    assert undisturbed
    assert [each for each in undisturbed if each[1].cached != PAGES - 1] == []
    assert [each for each in played if each[1].free != HOST_PAGES - each[1].cached] == []
    assert [each for each in played if (each[1].ended, each[1].fetches) != (1, 0)] == []


def test_with_io_that_ends_at_once_a_prefetch_takes_one_step_more_in_all() -> None:
    """What a verdict orders at depth 1 can be in the round that the same step launches."""
    at_once = Schedule(answers=(0, 0), reads=(0, 0), deadline=None, abort=None, quiet=0)

    steps = [Play(at_once, depth).run().steps for depth in (0, 1)]

    query_transfer_quiesce = 3
    assert steps == [query_transfer_quiesce, query_transfer_quiesce + 1]
