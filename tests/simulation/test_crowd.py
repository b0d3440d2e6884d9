"""The simulation of groups that are too large for processes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lockstep.coordinator.collective import Vector
from lockstep.ranks.replica.digest import state_digest
from lockstep.simulation import host_ring
from lockstep.simulation.checkers.findings.finding import Violated
from lockstep.simulation.crowd import CrowdRounds, CrowdSettings


@pytest.mark.parametrize(
    ("ranks", "hosts", "operations"), [(2, 1, 32), (8, 2, 64), (7, 3, 40), (64, 8, 256)]
)
def test_a_crowd_comes_to_rest_with_equal_folds_and_equal_replicas(
    ranks: int, hosts: int, operations: int
) -> None:
    """Every round of it compares the folds bit by bit, and the replicas' digests."""
    settings = CrowdSettings(ranks=ranks, hosts=hosts, operations=operations, failing=0.1, seed=7)

    crowd = CrowdRounds(settings, lambda: 0.0)
    in_flight = len(crowd.replica.agenda.in_flight)
    crowd.run()

    assert in_flight == operations, settings
    assert crowd.replica.idle
    assert state_digest(crowd.replica) == state_digest(crowd.flat_replica)
    assert crowd.rounds > 2


def test_a_host_that_comes_to_another_fold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = host_ring.gather

    def one_lane_is_off_by_one(given: Sequence[Vector]) -> host_ring.Exchanged:
        exchanged = gather(given)
        exchanged.folded[1][20] += 1
        return exchanged

    monkeypatch.setattr(host_ring, "gather", one_lane_is_off_by_one)

    with pytest.raises(Violated, match="the folds of round 1 differ"):
        CrowdRounds(CrowdSettings(ranks=8, hosts=4, operations=64), lambda: 0.0)


def test_a_rank_whose_replica_differs_is_found() -> None:
    crowd = CrowdRounds(CrowdSettings(ranks=4, hosts=2, operations=64), lambda: 0.0)

    crowd.flat_replica.prefetch("one more", "", bytes(4096))

    with pytest.raises(Violated, match="replicas differ"):
        crowd.run()


def test_the_same_seed_gives_the_same_rounds_and_another_seed_others() -> None:
    settings = CrowdSettings(ranks=4, hosts=2, operations=64, seed=3)

    def digests(settings: CrowdSettings) -> list[int]:
        crowd = CrowdRounds(settings, lambda: 0.0)
        crowd.run()
        return [crowd.rounds, crowd.replica.digest]

    assert digests(settings) == digests(settings)
    assert digests(settings) != digests(replace(settings, seed=4))
