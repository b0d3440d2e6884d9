"""Stores come and go in simulated schedules (rule R14), and what goes wrong with them is found."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from planted_bugs import SEEDS_MAX, assert_found, making, violations

from lockstep.coordinator.proposal import Readiness
from lockstep.coordinator.verdict import Proposed
from lockstep.ranks.orders import DetachStore, Order
from lockstep.ranks.replica.attaching import Attaching
from lockstep.ranks.replica.backing_up import BackingUp
from lockstep.ranks.replica.prefetching import Prefetching
from lockstep.ranks.replica.state import Decision
from lockstep.simulation.epoch import Epoch
from lockstep.simulation.executor import SimulatedExecutor
from lockstep.simulation.explore import Report, explore
from lockstep.simulation.plain_words import in_plain_words
from lockstep.simulation.world import ENGINE, REPLICA


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((0, range(400, 405)), id="depth 0"),
        pytest.param((1, range(400, 405)), id="depth 1"),
        pytest.param((0, range(400, 414)), id="depth 0, more seeds", marks=pytest.mark.slow),
        pytest.param((1, range(400, 414)), id="depth 1, more seeds", marks=pytest.mark.slow),
    ],
)
def report(request: pytest.FixtureRequest) -> Report:
    depth, seeds = request.param
    return explore(seeds, ranks=2, steps=100, faults="crash", depth=depth, processes=1)


def test_no_schedule_in_which_stores_come_and_go_has_a_violation(report: Report) -> None:
    """Rule R14: all ranks have the same store after every step, and every proposal ends."""
    assert not report["violations"], "\n".join(each["replay"] for each in report["violations"])
    assert report["l1"].keys() == {REPLICA, ENGINE}
    coverage = report["coverage"]
    for name in ("stores attached", "stores detached", "proposals withdrawn"):
        assert coverage.get(name), f"{name} never happened"
    for outcome in ("prefetch aborted", "persist aborted"):
        assert report["outcomes"].get(outcome), f"{outcome} never happened"


def found(*, seeds: range = range(SEEDS_MAX), **planted: object) -> Iterator[str]:
    return violations(faults="storage", seeds=seeds, **planted)  # type: ignore[arg-type]


def plain(whats: Iterator[str]) -> Iterator[str]:
    """Yield what was found in plain words, which there must be for everything here."""
    for what in whats:
        said = in_plain_words(what)
        assert not said.startswith("Something that must always hold"), what
        yield said


def test_a_rank_that_does_not_wait_for_the_others_is_found() -> None:
    """It takes its own readiness for that of all, as a vote on local evidence does."""

    def attach_alone(epoch: Epoch) -> None:
        attaching = epoch.caches[1].replica.attaching
        consider = attaching.consider

        def consider_alone(proposed: Proposed | None) -> None:
            if proposed is not None and proposed.readiness is Readiness.STAGED:
                proposed = replace(proposed, readiness=Readiness.READY)
            consider(proposed)

        attaching.consider = consider_alone  # type: ignore[method-assign]

    assert_found(plain(found(tamper=attach_alone)), "no longer agree", "has not opened")


def test_a_store_that_is_let_go_of_with_work_in_flight_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def abandon_nothing(self: BackingUp | Prefetching) -> None:
        del self

    monkeypatch.setattr(BackingUp, "abandon", abandon_nothing)
    monkeypatch.setattr(Prefetching, "abandon", abandon_nothing)
    end_draining = Attaching._end_draining  # pyright: ignore[reportPrivateUsage]

    def end_at_once(self: Attaching) -> None:
        state = self._state  # pyright: ignore[reportPrivateUsage]
        working, state.operations.working = state.operations.working, Counter()
        end_draining(self)
        state.operations.working = working

    monkeypatch.setattr(Attaching, "_end_draining", end_at_once)

    assert_found(plain(found()), "after it was detached and closed")


def test_a_proposal_that_nobody_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Attaching._decide  # pyright: ignore[reportPrivateUsage]

    def never_withdraw(self: Attaching, decision: Decision) -> None:
        if decision.withdrawn is None:
            decide(self, decision)

    monkeypatch.setattr(Attaching, "_decide", never_withdraw)

    assert_found(plain(found()), "whoever asked waits for ever")


def test_a_rank_that_keeps_its_store_is_found() -> None:
    class _Attached(SimulatedExecutor):
        def carry_out(self, orders: Sequence[Order]) -> None:
            super().carry_out([order for order in orders if not isinstance(order, DetachStore)])

    words = ("no longer use the same storage", "while it still uses another one")
    assert_found(plain(found(make=making(_Attached))), *words)
