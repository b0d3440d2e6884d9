"""Stores are attached and detached in simulated schedules (rule R14), and planted bugs are found."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from lockstep.coordinator.proposal import Readiness
from lockstep.coordinator.verdict import Verdict
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.effects import Decision, Effects
from lockstep.ranks.protocol.orders import DetachStore, Order
from lockstep.ranks.replica.attaching import Attaching
from lockstep.ranks.replica.operations.persisting import Persisting
from lockstep.ranks.replica.parts import Parts
from lockstep.ranks.replica.prefetch.prefetching import Prefetching
from lockstep.simulation.exploration import Exploration
from lockstep.simulation.explore import ExplorationReport, explore
from lockstep.simulation.rank.epoch import Build
from lockstep.simulation.rank.executor import SimulatedExecutor
from lockstep.simulation.schedule import run_schedule
from lockstep.simulation.world.world import ENGINE, REPLICA
from tests.kit.planted_bugs import assert_found, making, violations


@pytest.fixture(scope="module", params=[0, 1], ids=["depth 0", "depth 1"])
def report(request: pytest.FixtureRequest) -> ExplorationReport:
    depth = request.param
    return explore(
        Exploration(seeds=range(380, 385), ranks=2, steps=100, faults="crash", depth=depth),
        processes=1,
    )


def test_no_schedule_in_which_stores_come_and_go_has_a_violation(report: ExplorationReport) -> None:
    """Rule R14: all ranks have the same store after every step, and every proposal ends."""
    assert not report["violations"], "\n".join(each["replay"] for each in report["violations"])
    assert report["l1"].keys() == {REPLICA, ENGINE}
    counts = {**report["coverage"], **report["outcomes"]}
    happened = {name for name, times in counts.items() if times}
    assert {"stores attached", "stores detached", "proposals withdrawn"} <= happened
    assert {"prefetch aborted", "persist aborted"} <= happened


@pytest.mark.parametrize(("seed", "faults"), [(0, "mixed"), (17, "crash")])
def test_one_rank_alone_may_detach_a_store_that_the_group_has_just_let_go_of(
    seed: int, faults: str
) -> None:
    result = run_schedule(seed, profile="qwen-next", faults=faults, depth=seed % 2)

    assert result.violation is None


def found(build: Build) -> Iterator[str]:
    return violations(build, faults="storage")


class _AttachesAlone(Cache):
    """Planted bug: a rank attaches the store as soon as it is ready itself, without the other ranks."""

    def _apply(self, verdict: Verdict) -> Effects:
        proposed = verdict.proposed
        if self.rank and proposed is not None and proposed.readiness is Readiness.STAGED:
            verdict = replace(verdict, proposed=replace(proposed, readiness=Readiness.READY))
        return super()._apply(verdict)


class _LeavesPersistsBe(Persisting):
    def abandon(self) -> None:
        pass


class _LeavesPrefetchesBe(Prefetching):
    def abandon(self) -> None:
        pass


class _WaitsForNothing(Attaching):
    def _end_draining(self) -> None:
        if self._store.draining:
            self._store.drained()
            self._outbox.orders.append(DetachStore())


class _NeverWithdraws(Attaching):
    def _decide(self, decision: Decision) -> None:
        if decision.withdrawn is None:
            super()._decide(decision)


class _KeepsItsStore(SimulatedExecutor):
    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out([order for order in orders if not isinstance(order, DetachStore)])


def test_a_rank_that_does_not_wait_for_the_others_is_found() -> None:
    assert_found(found(Build(cache=_AttachesAlone)), "digests differ", "that is not open")


def test_a_store_that_is_let_go_of_with_work_in_flight_is_found() -> None:
    parts = Parts(
        persisting=_LeavesPersistsBe, prefetching=_LeavesPrefetchesBe, attaching=_WaitsForNothing
    )
    assert_found(found(Build(parts=parts)), "which was closed")


def test_a_proposal_that_nobody_ends_is_found() -> None:
    assert_found(found(Build(parts=Parts(attaching=_NeverWithdraws))), "which does not end")


def test_a_rank_that_keeps_its_store_is_found() -> None:
    assert_found(found(making(_KeepsItsStore)), "different stores", "or beside another")
