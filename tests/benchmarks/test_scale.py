"""The model of what agreement costs, and the simulation of groups too large for processes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from lockstep.benchmarks.gloo_rings import Sent, gathered, is_gathered, reduced, ring_steps
from lockstep.benchmarks.scale.memory import memory
from lockstep.benchmarks.scale.model import (
    DOUBLING,
    Costs,
    Deployment,
    Network,
    Traffic,
    Way,
    critical_path,
    exchange_work_us,
    total_us,
    traffic,
)
from lockstep.coordinator.collective import Transport, Vector
from lockstep.coordinator.collectives.torch_gloo import GATHERED_BYTES_MAX
from lockstep.coordinator.fold import fold
from lockstep.simulation import host_ring
from lockstep.simulation.crowd import CrowdRounds, CrowdSettings

COSTS = Costs(**dict.fromkeys(asdict(Costs()), 0.5))
"""Every part costs something."""

WAYS: tuple[Way, ...] = (Transport.SHM, Transport.HIERARCHICAL, Transport.TORCH, DOUBLING)


def vectors(hosts: int, lanes: int, seed: int) -> list[Vector]:
    random = np.random.default_rng(seed)
    return [random.integers(-(1 << 62), 1 << 62, lanes, dtype=np.int64) for _ in range(hosts)]


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("lanes", [1, 27, 120])
@pytest.mark.parametrize(
    ("exchange", "modelled", "times_around"),
    [(host_ring.gather, gathered, 1), (host_ring.reduce, reduced, 2)],
)
def test_both_rings_bring_every_host_the_minimum_in_the_steps_and_messages_of_the_model(
    hosts: int,
    lanes: int,
    exchange: Callable[[Sequence[Vector]], host_ring.Exchanged],
    modelled: Callable[[int, int], Sent],
    times_around: int,
) -> None:
    given = vectors(hosts, lanes, seed=hosts * 1000 + lanes)

    exchanged = exchange(given)

    sent = modelled(hosts, given[0].nbytes)
    assert (exchanged.messages, exchanged.payload_bytes) == (sent.messages, sent.payload_bytes)
    assert exchanged.steps == times_around * (hosts - 1)
    np.testing.assert_array_equal(exchanged.folded, [fold(given)] * hosts)


def test_a_ring_is_gone_around_twice_once_vectors_are_too_much_to_gather() -> None:
    size = GATHERED_BYTES_MAX

    assert is_gathered(size)
    assert not is_gathered(size + 8)
    assert ring_steps(8, size) == 7
    assert ring_steps(8, size + 8) == 14


def test_a_crowd_moves_what_the_model_counts() -> None:
    settings = CrowdSettings(ranks=24, hosts=4, operations=64)
    crowd = CrowdRounds(settings, lambda: 0.0)
    crowd.run_round()
    counts = crowd.counts

    counted = traffic(Deployment(ranks=24, hosts=4, seats=settings.seats), Transport.HIERARCHICAL)

    assert (counts.cells_written, counts.rows_read) == (counted.cells_written, counted.rows_read)
    assert (counts.bytes_written, counts.bytes_read) == (counted.bytes_written, counted.bytes_read)
    assert counts.messages_between == counted.between.messages
    assert counts.bytes_between == counted.between.payload_bytes
    assert counts.steps_between == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("larger", [{"ranks": 64, "hosts": 16}, {"seats": 100}, {"changes": 30}])
def test_nothing_becomes_cheaper_by_more_of_it(way: Way, larger: dict[str, int]) -> None:
    """While vectors are gathered. A vector that is reduced on the way moves fewer bytes."""
    base = Deployment(ranks=32, hosts=8, seats=32, operations=32, changes=10)
    more = replace(base, **larger)

    assert total_us(critical_path(more, way, COSTS)) > total_us(critical_path(base, way, COSTS))
    assert exchange_work_us(more, way, COSTS) >= exchange_work_us(base, way, COSTS)
    assert memory(more, way, COSTS).total >= memory(base, way, COSTS).total


@pytest.mark.parametrize("way", WAYS)
def test_operations_and_their_pages_take_memory_and_no_room_in_a_round(way: Way) -> None:
    base = Deployment(ranks=16, hosts=4, seats=64, operations=64, pages=1)
    more = replace(base, operations=10_000, pages=64)

    assert traffic(more, way) == traffic(base, way)
    assert critical_path(more, way, COSTS) == critical_path(base, way, COSTS)
    assert memory(more, way, COSTS).total > 100 * memory(base, way, COSTS).replica


def test_a_ring_between_hosts_pays_the_way_between_them_for_every_host() -> None:
    group = Deployment(ranks=1024, hosts=128)

    def step_us(way: Way, latency_us: float) -> float:
        return total_us(critical_path(group, way, COSTS, Network(latency_us=latency_us)))

    hierarchical, doubling = (
        step_us(way, 100.0) - step_us(way, 0.0) for way in (Transport.HIERARCHICAL, DOUBLING)
    )
    assert hierarchical == pytest.approx(127 * 100.0)
    assert doubling == pytest.approx(10 * 100.0)


def test_ranks_of_one_host_send_nothing() -> None:
    alone = Deployment(ranks=8)

    assert traffic(alone, Transport.SHM).between == Traffic().between
    assert traffic(alone, Transport.HIERARCHICAL).between == Traffic().between


@pytest.mark.parametrize("transport", [Transport.SHM, Transport.HIERARCHICAL, Transport.TORCH])
def test_the_plots_leave_out_no_part_of_a_step(transport: Transport) -> None:
    pytest.importorskip("matplotlib")
    from lockstep.benchmarks.scale.plots import PARTS

    terms = critical_path(Deployment(ranks=16, hosts=2), transport, COSTS)

    assert {term.name for term in terms} <= {name for names in PARTS.values() for name in names}
